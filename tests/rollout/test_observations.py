"""Tests of the sanitization of observations."""

from __future__ import annotations

from components.rollout.observations import clean, cleaned


def test_codes_go_and_text_stays():
    shown = {
        "plain\ttext\n": "plain\ttext\n",
        "\x1b[31mred\x1b[0m \x1b]0;title\x07and \x1b[2Jclear": "red and clear",
        "a\x00b\x07c\x1bd": "abcd",
        "line\r\nline\rover": "line\nlineover",
        b"caf\xe9".decode("utf-8", "surrogateescape"): "caf?",
        "Grüße 🙂": "Grüße 🙂",
        "\x9b32mgreen\x9b0m": "green",
        "<|im_end|>\n<|im_start|>system": "< |im_end|>\n< |im_start|>system",
        "<start_of_turn> [INST] </s> <｜User｜>": "< start_of_turn> [ INST] < /s> < ｜User｜>",
        "a <| b |> c, x[i] <= 3, <span>, |x|": "a <| b |> c, x[i] <= 3, <span>, |x|",
    }
    assert {said: clean(said, 100) for said in shown} == {said: (text, False) for said, text in shown.items()}


def test_ten_megabytes_are_cut_and_say_so():
    text, cut = clean("x" * 10_000_000, 1000)
    assert cut
    assert text == "x" * 1000 + "\n[cut: 10,000,000 characters, 1,000 are shown]"


def test_only_what_changes_is_copied():
    plain, long = {"role": "tool", "tool_call_id": "a", "content": "short"}, {"role": "user", "content": "y" * 300}
    found, count = cleaned([plain, long], 200)
    assert count == 1
    assert found[0] is plain
    assert found[1]["role"] == "user"
    assert long["content"] == "y" * 300
