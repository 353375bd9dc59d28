"""Speaks vLLM's endpoints over a real socket, without a model: what it answers follows from model name and seed.

`--fault` says what is wrong with it: `dies` at its start, `hangs` there, `liar` answers for another model, `raw` gives
log-probabilities before the cut, `forgets` lists no adapters, `slow` takes a second for an answer, `stuck` ten
minutes for one of the base model. `POST /die` ends it.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def options():
    parser = argparse.ArgumentParser()
    for name in ("--model", "--served-model-name", "--fault"):
        parser.add_argument(name, default="")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    return parser.parse_known_args()[0]


def main():
    given = options()
    if given.fault == "dies":
        print("loading the weights", flush=True)
        sys.exit("RuntimeError: no memory for the cache of keys and values")
    if given.fault == "hangs":
        time.sleep(60)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(given.model) / "tokenizer.json"))
    adapters, lock, seen = {}, threading.Lock(), []
    sleeps = given.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    asleep = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def say(self, body, status=200):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status, message):
            self.say({"error": {"message": message, "type": "error", "code": status}}, status)

        def do_GET(self):
            if self.path == "/seen":
                return self.say(seen)
            if self.path == "/is_sleeping":
                return self.say({"is_sleeping": asleep.is_set()}) if sleeps else self.refuse(404, "Not Found")
            if self.path != "/v1/models":
                return self.say({})
            base = {"id": given.served_model_name, "root": given.model, "max_model_len": given.max_model_len}
            known = {} if given.fault == "forgets" else adapters
            loaded = [{"id": name, "root": root, "parent": base["id"]} for name, root in known.items()]
            return self.say({"data": [base, *loaded]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            if self.path == "/die":
                os._exit(3)
            with lock:
                seen.append([self.path, body])
            if self.path in ("/sleep?level=1", "/wake_up") and sleeps:
                asleep.set() if "sleep" in self.path else asleep.clear()
                return self.say({})
            answer = {"/tokenize": self.tokenize, "/v1/completions": self.complete, "/v1/load_lora_adapter": self.load}
            answer.get(self.path, lambda body: self.refuse(404, "Not Found"))(body)

        def tokenize(self, body):
            self.say({"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False).ids})

        def load(self, body):
            config = Path(body["lora_path"]) / "adapter_config.json"
            if not config.is_file():
                return self.refuse(404, f"Loading lora {body['lora_name']} failed: No adapter found")
            rank = json.loads(config.read_text())["r"]
            if rank > given.max_lora_rank:
                text = f"LoRA rank {rank} is greater than max_lora_rank {given.max_lora_rank}."
                return self.refuse(500, text)
            if body["lora_name"] in adapters and not body.get("load_inplace"):
                return self.refuse(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            adapters[body["lora_name"]] = body["lora_path"]
            return self.say("Success")

        def complete(self, body):
            model = body["model"]
            if asleep.is_set():
                return self.refuse(400, "the engine sleeps")
            if model != given.served_model_name and model not in adapters:
                return self.refuse(404, f"The model `{model}` does not exist.")
            if given.fault == "slow":
                time.sleep(1.0)
            if given.fault == "stuck" and model == given.served_model_name:
                time.sleep(600.0)
            said = tokenizer.encode(f"{model}/{body.get('seed', 0)}", add_special_tokens=False).ids
            tokens = [*said, *body.get("stop_token_ids", [])[:1]][: body["max_tokens"]]
            logprob = 0.0 if body.get("top_k") == 1 and given.fault != "raw" else -0.5
            choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [logprob] * len(tokens)}}
            return self.say({"model": "other" if given.fault == "liar" else model, "choices": [choice]})

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", given.port), Handler)
    server.daemon_threads = True
    server.serve_forever(0.05)


if __name__ == "__main__":
    main()
