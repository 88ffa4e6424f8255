"""Wheels of the workspace's packages."""

def _wheel_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add("--package", ctx.file.pyproject.dirname)
    args.add("--out", out.path)
    args.add(ctx.file.pyproject)
    args.add_all(ctx.files.srcs)
    args.add_all(ctx.files._shared)
    ctx.actions.run(
        outputs = [out],
        inputs = ctx.files.srcs + ctx.files._shared + [ctx.file.pyproject],
        executable = ctx.executable._builder,
        arguments = [args],
        mnemonic = "PyWheel",
        progress_message = "Building the wheel of %{label}",
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel_impl,
    doc = "A folder with the wheel that pyproject.toml describes.",
    attrs = {
        "pyproject": attr.label(allow_single_file = True, mandatory = True),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "_builder": attr.label(default = "//tools/bazel:build_wheel", executable = True, cfg = "exec"),
        "_shared": attr.label_list(
            # The version, the license and the metadata that all packages share.
            default = ["//:pyproject.toml", "//:LICENSE", "//tools/bazel:hatch_hook.py"],
            allow_files = True,
        ),
    },
)

def _wheels_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run_shell(
        outputs = [out],
        inputs = ctx.files.srcs,
        command = 'out=$1; shift; for folder; do cp "$folder"/*.whl "$out"; done',
        arguments = [out.path] + [folder.path for folder in ctx.files.srcs],
        mnemonic = "PyWheels",
    )
    return [DefaultInfo(files = depset([out]))]

wheels = rule(
    implementation = _wheels_impl,
    doc = "A folder with the wheels of several packages.",
    attrs = {"srcs": attr.label_list(doc = "Targets of the rule `wheel`.", mandatory = True)},
)
