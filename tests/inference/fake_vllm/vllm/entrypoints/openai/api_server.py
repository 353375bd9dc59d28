"""Speaks vLLM's endpoints over a real socket, without a model: what it answers follows from model name and seed.

A grammar (`structured_outputs`) is enforced as vLLM's guidance backend does, with llguidance on the tokenizer file: the
answer is drawn from the allowed tokens, all of the same probability. A stream has one token in an event, as vLLM's has
unless its client is slow.

`--fault` says what is wrong with it: `dies` at its start, `hangs` there, `liar` answers for another model, `raw` gives
log-probabilities before the cut and the grammar, `forgets` lists no adapters, `slow` takes a second for an answer,
`stale` computes the log-probabilities of a prompt with the first adapter or the first weights, whichever is asked for,
`cached` keeps its prefix cache, `discarded` computes with no adapter after a sleep, `stuck` takes ten minutes for an
answer of the base model, `ignores` grammars as versions before 0.11 do, `breaks` the first stream after three tokens,
`paused` waits before the third token of a stream until `POST /go`, `tail:N:S` has `TAIL` tokens in most answers and N
times as many in one of `RARE`, and takes S seconds for each token. `POST /die` ends it.
"""

import argparse
import json
import math
import os
import random
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TAIL, RARE = 8, 16


def options():
    parser = argparse.ArgumentParser()
    for name in ("--model", "--tokenizer", "--served-model-name", "--fault"):
        parser.add_argument(name, default="")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=0)
    parser.add_argument("--enable-sleep-mode", action="store_true")
    return parser.parse_known_args()[0]


def eos_of(tokenizer_file):
    """The tokenizer's end-of-sequence token, which alone vLLM's guidance backend knows as an end."""
    config = json.loads(tokenizer_file.with_name("tokenizer_config.json").read_text())
    token = config["eos_token"]
    return token["content"] if isinstance(token, dict) else token


def load():
    raise ValueError("No available memory for the cache blocks.")


def die():
    """As the engine's process logs its error, and then the server's its own."""
    try:
        load()
    except ValueError:
        prefix = "(EngineCore pid=7) ERROR 11-27 22:57:49 [core.py:1330] "
        print("".join(f"{prefix}{line}\n" for line in traceback.format_exc().splitlines()), flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")


def main():
    given = options()
    if given.fault == "dies":
        return die()
    if given.fault == "hangs":
        time.sleep(60)
    from tokenizers import Tokenizer

    tokenizer_file = Path(given.tokenizer or given.model) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    adapters, lock, seen = {}, threading.Lock(), []
    sleeps = given.enable_sleep_mode and os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    asleep, slept, go, broken = (threading.Event() for _ in range(4))
    develops, weights = os.environ.get("VLLM_SERVER_DEV_MODE") == "1", []

    def constrained(grammar, body):
        """The tokens of an answer with a grammar and their log-probabilities, or the message of an error."""
        import llguidance

        vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        end = tokenizer.token_to_id(eos_of(tokenizer_file))
        wrapped = llguidance.LLTokenizer(tokenizer_file.read_text(), n_vocab=vocabulary, eos_token=end)
        compiled = llguidance.grammar_from("grammar", grammar)
        if error := llguidance.LLMatcher.validate_grammar(compiled, wrapped):
            return f"Grammar error: {error}"
        matcher = llguidance.LLMatcher(wrapped, compiled, log_level=0)
        draw, tokens, logprobs, ended = random.Random(body.get("seed", 0)), [], [], False
        while len(tokens) < body["max_tokens"] and not set(tokens[-1:]) & set(body.get("stop_token_ids", [])):
            bits = matcher.compute_bitmask()
            allowed = [token for token in range(vocabulary) if ended or bits[token // 8] >> token % 8 & 1]
            tokens.append(draw.choice(allowed))
            logprobs.append(-math.log(vocabulary if given.fault == "raw" else len(allowed)))
            ended = ended or tokens[-1] == end  # as `GuidanceGrammar.accept_tokens`
            if not matcher.is_stopped() and not matcher.consume_token(tokens[-1]):
                return "Internal server error"
        return tokens, logprobs

    def tailed(body):
        """The tokens of a long or short answer, or those that its first tokens, at the end of the prompt, lack."""
        long, short = (tokenizer.token_to_id(text) for text in "!#")
        first = long if random.Random(body.get("seed")).random() < 1 / RARE else short
        begun = 0
        while (token := body["prompt"][-1 - begun]) in (long, short):
            first, begun = token, begun + 1
        length = TAIL * (int(given.fault.split(":")[1]) if first == long else 1)
        tokens = [first] * (length - begun - 1) + body["stop_token_ids"][:1]
        return tokens, [-0.5] * len(tokens)

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
            if self.path == "/go":
                go.set()
                return self.say({})
            with lock:
                seen.append([self.path, body])
            if sleeps and self.path.partition("?")[0] in ("/sleep", "/wake_up", "/collective_rpc"):
                if self.path.startswith("/sleep"):
                    asleep.set(), slept.set()
                elif self.path in ("/wake_up", "/wake_up?tags=kv_cache"):
                    asleep.clear()
                return self.say({})
            if develops and self.path in ("/pause?mode=wait", "/resume"):
                return self.say({})
            if develops and self.path == "/collective_rpc" and body["method"] == "reload_weights":
                weights.append(body["kwargs"]["weights_path"])
                return self.say({"results": [None]})
            if develops and self.path == "/reset_prefix_cache":
                return self.say({"success": given.fault != "cached"})
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
            if "prompt_logprobs" in body:
                return self.score(model, body["prompt"])
            if given.fault == "slow":
                time.sleep(1.0)
            if given.fault == "stuck" and model == given.served_model_name:
                time.sleep(600.0)
            said = tokenizer.encode(f"{model}/{body.get('seed', 0)}", add_special_tokens=False).ids
            tokens = [*said, *body.get("stop_token_ids", [])[:1]][: body["max_tokens"]]
            logprobs = [0.0 if body.get("top_k") == 1 and given.fault != "raw" else -0.5] * len(tokens)
            grammar = (body.get("structured_outputs") or {}).get("grammar")
            if grammar is not None and given.fault != "ignores":
                drawn = constrained(grammar, body)
                if isinstance(drawn, str):
                    return self.refuse(400 if drawn.startswith("Grammar error") else 500, drawn)
                tokens, logprobs = drawn
            if given.fault.startswith("tail") and "stop_token_ids" in body:
                tokens, logprobs = tailed(body)
                if not body.get("stream"):
                    time.sleep(len(tokens) * float(given.fault.split(":")[2]))
            answering = "other" if given.fault == "liar" else model
            stopped = tokens[-1] in body.get("stop_token_ids", [])
            if body.get("stream"):
                return self.stream(answering, tokens, logprobs, body, "stop" if stopped else "length")
            known = {"token_logprobs": logprobs, "top_logprobs": self.likeliest(tokens, logprobs, body)}
            choice = {"token_ids": tokens, "logprobs": known, "finish_reason": "stop"}
            return self.say({"model": answering, "choices": [choice]})

        def score(self, model, prompt):
            """Answer with the log-probabilities of the model's own weights."""
            sys.path.append(str(Path(__file__).resolve().parents[6]))
            from safetensors.torch import load_file

            from tests.algorithms.plain_llama import PlainLlama

            folder = adapters.get(model) or (weights[0 if given.fault == "stale" else -1] if weights else None)
            if given.fault == "stale" and adapters:
                folder = next(iter(adapters.values()))
            if given.fault == "discarded" and slept.is_set():
                folder = None
            base, folder, adapter, scale = Path(given.model), Path(folder or given.model), None, 0.0
            if (folder / "adapter_config.json").is_file():
                config = json.loads((folder / "adapter_config.json").read_text())
                tensors = load_file(folder / "adapter_model.safetensors").items()
                adapter = {name.replace(".weight", ".default.weight"): tensor.double() for name, tensor in tensors}
                scale = config["lora_alpha"] / config["r"]
            llama = PlainLlama(base, scale)
            if adapter is None:
                llama.weights.update((k, v.double()) for k, v in load_file(folder / "model.safetensors").items())
            logprobs_TV = llama.logps(llama.hidden(prompt[:-1], adapter), 1.0)
            logprobs = logprobs_TV[range(len(prompt) - 1), prompt[1:]].tolist()
            entries = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], logprobs, strict=True)]
            choice = {"prompt_logprobs": [None, *entries], "token_ids": [0], "finish_reason": "length"}
            return self.say({"model": model, "choices": [choice]})

        def likeliest(self, tokens, logprobs, body):
            """As `_create_completion_logprobs`: the sampled token first, then `logprobs` others; here `!`, 5 % less
            likely each time, and one that cannot be sampled."""
            entries = []
            for token, logprob in zip(tokens, logprobs, strict=True):
                others = [tokenizer.token_to_id(text) for text in '!"#$%&'[: body.get("logprobs", 0)]]
                values = {token: logprob} | {other: -0.05 - 0.1 * place for place, other in enumerate(others)}
                if others:
                    values[others[-1]] = -9999.0
                named = body.get("return_tokens_as_token_ids")
                entries.append({f"token_id:{i}" if named else tokenizer.decode([i]): v for i, v in values.items()})
            return entries

        def stream(self, model, tokens, logprobs, body, reason):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                if given.fault.startswith("tail"):
                    time.sleep(float(given.fault.split(":")[2]))
                if place == 2 and given.fault == "paused":
                    go.wait(600)
                if place == 3 and given.fault == "breaks" and not broken.is_set():
                    broken.set()
                    return self.connection.shutdown(socket.SHUT_RDWR)
                known = {"token_logprobs": [logprob], "top_logprobs": self.likeliest([token], [logprob], body)}
                choice = {"index": 0, "text": "", "logprobs": known, "token_ids": [token]}
                choice["prompt_token_ids"] = None if place else body["prompt"]
                choice["finish_reason"] = reason if place == len(tokens) - 1 else None
                self.event(json.dumps({"object": "text_completion", "model": model, "choices": [choice]}))
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def event(self, data):
            chunk = f"data: {data}\n\n".encode()
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            self.wfile.flush()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", given.port), Handler)
    server.daemon_threads = True
    server.serve_forever(0.05)


if __name__ == "__main__":
    main()
