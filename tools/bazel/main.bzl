"""The main file of a command."""

_MAIN = """\
\"\"\"Runs {module}.\"\"\"

import launch

launch.run("{module}")
"""

def _main_module_impl(ctx):
    ctx.actions.write(ctx.outputs.out, _MAIN.format(module = ctx.attr.module))

main_module = rule(
    implementation = _main_module_impl,
    doc = "A Python file that runs a module the way `python -m` does.",
    attrs = {
        "module": attr.string(mandatory = True),
        "out": attr.output(mandatory = True),
    },
)
