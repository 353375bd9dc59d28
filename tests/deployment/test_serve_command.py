"""`python -m components.inference.server` on an export, started as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import openai

from components.deployment.export import export_merged as export

ROOT = Path(__file__).parents[2]


def test_it_serves_an_export_until_it_is_told_to_stop(base_dir, adapter_dir, tmp_path):
    export(base_dir, adapter_dir, tmp_path / "shop-agent", "")
    command = [sys.executable, "-m", "components.inference.server", str(tmp_path / "shop-agent"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("serving "))
            assert line.startswith("serving shop-agent on http://127.0.0.1:")
            with openai.OpenAI(base_url=line.split()[3], api_key="none", timeout=600) as client:
                prompt = [{"role": "user", "content": "Hello"}]
                answer = client.chat.completions.create(model="shop-agent", messages=prompt, max_tokens=4)
                response = client.responses.create(model="shop-agent", input="Hello", max_output_tokens=4)
                listed = [model.id for model in client.models.list()]
            assert (answer.model, response.model, listed) == ("shop-agent", "shop-agent", ["shop-agent"])
            assert answer.usage.completion_tokens <= 4
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 0
        finally:
            process.kill()
