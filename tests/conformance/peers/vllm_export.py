"""Greedy answers of a merged export, or of a base model with an exported adapter, by vLLM, run by the Python of an
environment with vLLM; nothing of Espalier is imported.

Input: a JSON object with `folder`, `adapter` (a folder or null), `dtype`, `conversations` (messages and tools) and
`max_tokens`.
Output: the version, and prompt and answer of each conversation as token ids.
"""

import contextlib
import json
import sys


def answers(folder: str, adapter: str | None, dtype: str, conversations: list[dict], max_tokens: int) -> list[dict]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"dtype": dtype, "max_model_len": 1024, "enforce_eager": True, "generation_config": "vllm"}
    lora = None
    if adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": 64, "tokenizer": adapter}  # the exported chat template
        lora = LoRARequest("policy", 1, adapter)
    model = LLM(model=folder, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    found = []
    for talk in conversations:
        (output,) = model.chat(
            talk["messages"], sampling, tools=talk["tools"] or None, lora_request=lora, use_tqdm=False
        )
        found.append({"prompt": list(output.prompt_token_ids), "answer": list(output.outputs[0].token_ids)})
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        result = answers(**asked)
        import vllm
    json.dump({"version": f"vllm {vllm.__version__}", "answers": result}, sys.stdout)
