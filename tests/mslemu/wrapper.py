"""The text that MLX compiles for a `mx.fast.metal_kernel`, and what a C++ compiler needs to run it.

`generate` follows MLX 0.32.4; a test compares it with MLX's own text (`mlx_text`), byte for byte.
Rules worth knowing when writing a kernel:
- an input of fewer than 8 elements lives in `constant`, not `device`; a 0-dim one is a reference;
- `<input>_shape`, `_strides`, `_ndim` and the attributes are declared when their name occurs anywhere in the body,
  comments included; the header is not searched.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

TYPES = {
    mx.bool_: "bool", mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t", mx.int64: "int64_t",
    mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t",
    mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float", mx.complex64: "complex64_t",
}  # fmt: skip

# Metal's thread attributes (Metal Shading Language specification, table of input attributes of kernels).
UINT3 = {
    "dispatch_threads_per_threadgroup", "grid_origin", "grid_size", "thread_position_in_grid",
    "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid",
    "threads_per_threadgroup",
}  # fmt: skip
UINT = {
    "dispatch_quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup",
    "thread_execution_width", "thread_index_in_quadgroup", "thread_index_in_simdgroup",
    "thread_index_in_threadgroup", "threads_per_simdgroup",
}  # fmt: skip
ATTRIBUTES = sorted(UINT3 | UINT)
CONSTANT_BELOW = 8  # elements


@dataclass
class Parameter:
    """One buffer argument of the kernel function."""

    name: str
    type: str  # element type, as written in the text
    decl: str  # "const device float*", the type of the parameter
    role: str  # input | shape | strides | ndim | output
    index: int  # of the input or output it belongs to


@dataclass
class KernelText:
    """The generated text and its parts."""

    text: str
    function: str
    parameters: list
    attributes: list
    template: list  # [(name, value)]
    body_line: int  # line of the text that holds the first line of the body
    header_lines: int


def template_value(value):
    if isinstance(value, bool):
        return str(int(value))
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def template_kind(value):
    if isinstance(value, bool):
        return "bool"
    return "typename" if isinstance(value, mx.Dtype) else "int"


def generate(name, input_names, output_names, source, header, atomic_outputs, inputs, output_dtypes, template):
    """KernelText of one call; `inputs` = [(dtype, shape)], `template` = [(name, bool | int | Dtype)]."""
    function = f"custom_kernel_{name}"
    if template:
        function += "__" + "_".join(template_value(v).replace("-", "_") for _, v in template)
    parameters, lines = [], []
    for i, (arg, (dtype, shape)) in enumerate(zip(input_names, inputs)):
        size = 1
        for n in shape:
            size *= n
        function += f"_{TYPES[dtype]}" + ("s" if not shape else "c" if size < CONSTANT_BELOW else "")
        space, ref = ("constant" if size < CONSTANT_BELOW else "device"), ("*" if shape else "&")
        parameters.append(Parameter(arg, TYPES[dtype], f"const {space} {TYPES[dtype]}{ref}", "input", i))
        if shape:
            for role, decl in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
                if f"{arg}_{role}" in source:
                    decl = f"const constant {decl}"
                    parameters.append(Parameter(f"{arg}_{role}", decl.split()[-1][:-1], decl, role, i))
    for i, (arg, dtype) in enumerate(zip(output_names, output_dtypes)):
        function += f"_{TYPES[dtype]}"
        kind = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        parameters.append(Parameter(arg, kind, f"device {kind}*", "output", i))
    attributes = [a for a in ATTRIBUTES if a in source]
    for i, p in enumerate(parameters):
        end = ",\n"
        # MLX counts the shape parameters here but not in the limit: a quirk kept on purpose.
        if p.role == "output" and not attributes and i >= len(inputs) + len(output_names) - 1:
            end = ") {\n"
        lines.append(f"  {p.decl} {p.name} [[buffer({i})]]{end}")
    for a in attributes:
        lines.append(
            f"  {'uint3' if a in UINT3 else 'uint'} {a} [[{a}]]" + (",\n" if a != attributes[-1] else ") {\n")
        )
    head = header
    if template:
        head += "template <" + ", ".join(f"{template_kind(v)} {n}" for n, v in template) + ">\n"
    head += f"[[kernel]] void {function}(\n" + "".join(lines)
    text = head + source + "\n}\n"
    if template:
        call = f"{function}<{', '.join(template_value(v) for _, v in template)}>"
        text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({call}) {call};\n'
    return KernelText(text, function, parameters, attributes, template, head.count("\n") + 1, header.count("\n"))


def mlx_text(kernel, inputs, **call):
    """The text MLX itself generates for this call, on any machine: an exported graph holds it as a string."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.mlxfn"
        arrays = [x for x in inputs if isinstance(x, mx.array)]

        def graph(*traced):
            traced = iter(traced)
            return kernel(inputs=[next(traced) if isinstance(x, mx.array) else x for x in inputs], **call)

        mx.export_function(str(path), graph, *arrays)
        data = path.read_bytes()
    at = data.find(b"custom_kernel_") - 8  # two strings, each behind its 8-byte length: the name and the text
    size = int.from_bytes(data[at : at + 8], "little")
    at += 8 + size
    size = int.from_bytes(data[at : at + 8], "little")
    return data[at + 8 : at + 8 + size].decode()


def blank_comments(text):
    """`text` with comments and string contents blanked, every character still on its line and column."""
    keep = lambda m: re.sub(r"[^\n]", " ", m.group())  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", keep, text, flags=re.S)


def find_close(text, at, pair="()"):
    """Index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    return len(text)


def threadgroup_variables(text):
    """[(start, end, type, [(name, extents)])] of the declarations `threadgroup T a[N], b;`, pointers left out."""
    code, found = blank_comments(text), []
    for match in re.finditer(r"\bthreadgroup\s+", code):
        end, depth = match.end(), 0
        while end < len(code) and not (depth == 0 and code[end] in ";{}()*&="):
            depth += (code[end] in "[<") - (code[end] in "]>")
            end += 1
        if code[end : end + 1] != ";":
            continue  # a pointer, a reference, a parameter, a method qualifier
        parts, depth, last = [], 0, match.end()
        for i in range(match.end(), end + 1):
            depth += (code[i] in "[<") - (code[i] in "]>")
            if (code[i] == "," and depth == 0) or i == end:
                parts.append(code[last:i])
                last = i + 1
        first = re.match(r"(.*?)(\w+)\s*((?:\[.*\]\s*)?)$", parts[0], flags=re.S)
        if not first or not first.group(1).strip():
            continue
        names = [(first.group(2), first.group(3).strip())]
        for part in parts[1:]:
            m = re.match(r"\s*(\w+)\s*(.*)$", part, flags=re.S)
            names.append((m.group(1), m.group(2).strip()))
        found.append((match.start(), end + 1, first.group(1).strip(), names))
    return found


def rewrite_threadgroup(text):
    """The text with threadgroup variables turned into references to emulated memory, the only edit; lines kept."""
    variables, out, last, number = [], [], 0, 0
    for start, end, kind, names in threadgroup_variables(text):
        new = ""
        for name, extents in names:
            new += (
                f"typedef {kind} msl_tg_{name}_t{extents}; auto& {name} = msl::tg_var<msl_tg_{name}_t>({number}); "
            )
            variables.append((name, text.count("\n", 0, start) + 1))
            number += 1
        out += [text[last:start], new + "\n" * text.count("\n", start, end)]
        last = end
    return "".join(out) + text[last:], variables


def entry_point(kernel):
    """C++ that calls the kernel function for one thread: `buffers` in parameter order, `ids` = the attributes."""
    args = []
    for i, p in enumerate(kernel.parameters):
        decl = p.decl.replace("device ", "").replace("constant ", "")
        args.append(f"*({decl[:-1]}*)buffers[{i}]" if decl.endswith("&") else f"({decl})buffers[{i}]")
    args += [f"ids->{a}" for a in kernel.attributes]
    values = ", ".join(template_value(v) for _, v in kernel.template)
    call = f"{kernel.function}<{values}>" if kernel.template else kernel.function
    return (
        'extern "C" __attribute__((no_sanitize("thread", "undefined"), no_sanitize_coverage))\n'
        f"void msl_entry(void** buffers, const msl::Ids* ids) {{ {call}({', '.join(args)}); }}\n"
    )
