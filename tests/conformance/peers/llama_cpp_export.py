"""Greedy answers of a GGUF file by llama.cpp, run by the Python of an environment with xllamacpp; nothing of Espalier
is imported.

Input: a JSON object with `file`, `conversations` (messages and tools) and `max_tokens`. Output: the version, and prompt
and answer of each conversation as token ids. llama.cpp's server renders the prompt with the file's own chat template.
"""

import json
import sys
import urllib.request
from importlib.metadata import version


def post(address: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def answers(file: str, conversations: list[dict], max_tokens: int) -> list[dict]:
    from xllamacpp import CommonParams, Server, ggml_type, llama_flash_attn_type

    settings = CommonParams()
    settings.model.path = file
    settings.n_ctx = 1024
    settings.n_parallel = 1
    settings.use_jinja = True
    settings.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = ggml_type.GGML_TYPE_F32  # not float16, as by default
    server = Server(settings)
    answered = []
    for talk in conversations:
        body = {"messages": talk["messages"]} | ({"tools": talk["tools"]} if talk["tools"] else {})
        text = post(server.listening_address, "/apply-template", body)["prompt"]
        tokenized = post(
            server.listening_address, "/tokenize", {"content": text, "add_special": False, "parse_special": True}
        )
        prompt = tokenized["tokens"]
        sampling = {"temperature": 0.0, "top_k": 1, "repeat_penalty": 1.0, "n_predict": max_tokens}
        body = {"prompt": prompt, "return_tokens": True, "cache_prompt": False, **sampling}
        answered.append({"prompt": prompt, "answer": post(server.listening_address, "/completion", body)["tokens"]})
    return answered


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({"version": f"xllamacpp {version('xllamacpp')}", "answers": answers(**asked)}))
