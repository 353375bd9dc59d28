"""Greedy answers of an exported model by transformers, and PEFT for an adapter; nothing of Espalier is imported.

Input: a JSON object with `folder`, `adapter` (a folder, or null), `conversations` (messages and tools) and
`max_tokens`. Output: the versions, and prompt and answer of each conversation as token ids.
"""

import json
import sys
from importlib.metadata import version


def answers(folder: str, adapter: str | None, conversations: list[dict], max_tokens: int) -> list[dict]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    found = []
    for talk in conversations:
        inputs = tokenizer.apply_chat_template(
            talk["messages"],
            tools=talk["tools"] or None,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            (output,) = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False).tolist()
        count = inputs["input_ids"].shape[1]
        found.append({"prompt": output[:count], "answer": output[count:]})
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    result = answers(**asked)
    name = "peft" if asked["adapter"] else "transformers"
    json.dump({"version": f"{name} {version(name)}", "answers": result}, sys.stdout)
