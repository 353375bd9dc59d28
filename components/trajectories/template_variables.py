"""Variables of a chat template that its caller may set, such as `enable_thinking`."""

from __future__ import annotations

from jinja2 import meta, nodes

from components.trajectories.template_worker import environment

GIVEN = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
}  # fmt: skip
"""Variables that every rendering sets."""
TOKENS = {name: f"<{name}>" for name in GIVEN if name.endswith("_token")}
"""Special tokens of a rendering without a tokenizer."""


def variables(template: str) -> set[str]:
    """Return the variables that a template reads and that a rendering does not set itself. A variable that the template
    assigns counts only if the template asks whether it is defined, parameters of macros do not. Raises
    jinja2.TemplateError."""
    jinja = environment()
    tree = jinja.parse(template)
    assigned, parameters = (
        {name.name for name in tree.find_all(nodes.Name) if name.ctx == context} for context in ("store", "param")
    )
    optional = {
        asked.node.name
        for asked in tree.find_all((nodes.Test, nodes.Filter))
        if asked.name in ("defined", "undefined", "default", "d") and isinstance(asked.node, nodes.Name)
    }
    read = meta.find_undeclared_variables(tree) - GIVEN - jinja.globals.keys()
    return {name for name in read - parameters if name not in assigned or name in optional}
