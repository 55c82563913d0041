"""Rules of Metal that g++ does not know: address spaces (clang checks them, as OpenCL C++), what Metal leaves out.

clang comes from Debian's package clang (no recommended packages needed); without it only the token rules run, and
`clang()` is None: tests say so and skip.
"""

import functools
import re
import shutil
import subprocess

from . import build, wrapper
from .emulator import MAX_BUFFERS, Finding

SPACES = ("device", "constant", "threadgroup", "thread")
TYPES = (
    "bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|u?int(?:8|16|32|64)_t|size_t|"
    "float16_t|bfloat16_t|"
    r"(?:packed_)?(?:bool|u?char|u?short|u?int|u?long|half|float|bfloat)[234]|vec<[^<>]*>"
)
# Words of Metal that a C++ programmer may take for free names.
KEYWORDS = (
    "device constant thread threadgroup threadgroup_imageblock kernel vertex fragment half bfloat sampler "
    "texture2d ray_data object_data mesh visible stitchable imageblock uchar ushort uint ulong metal"
).split()
STATIC = rf"\bstatic\s+(?!inline|constexpr|constant|const\b|METAL_FUNC)(?:{TYPES})\s+\w+\s*[=;\[]"
# (kind, pattern, what to say)
FORBIDDEN = [
    ("double", r"\bdouble\b", "Metal has no double"),
    ("double", r"\b\d+\.\d*(?:[eE][-+]?\d+)?[lL]\b", "a long double literal"),
    ("std", r"\bstd\s*::", "Metal has no std::"),
    ("goto", r"\bgoto\b", "Metal has no goto"),
    ("lambda", r"(?:=|\(|,|return)\s*\[[&=\w\s,]*\]\s*\(", "no lambdas in the versions MLX compiles for"),
    ("new-delete", r"\bnew\s+\w|\bdelete\b(?!\s*;)", "Metal has no new and delete"),
    ("virtual", r"\bvirtual\b", "Metal has no virtual functions"),
    ("exception", r"\b(?:try|catch|throw)\b", "Metal has no exceptions"),
    ("rtti", r"\b(?:dynamic_cast|typeid)\b", "Metal has no run-time type information"),
    ("asm", r"\basm\b|\b__asm", "no assembler"),
    ("thread-local", r"\bthread_local\b", "Metal has no thread_local"),
    (
        "c-library",
        r"\b(?:printf|malloc|free|memcpy|memset|assert|\w+hf|expf|logf|sqrtf)\s*\(",
        "Metal has no C library",
    ),
    ("static-variable", STATIC, "a static variable must be constant"),
]


@functools.cache
def clang():
    """Path of a clang, or None."""
    names = ["clang", *(f"clang-{n}" for n in range(22, 13, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


def lint(kernel, inputs, output_dtypes, template=None, **_call):
    """Findings in the text of a kernel for these inputs; takes the arguments of a call."""
    text = kernel.text(inputs, output_dtypes, template)
    lines = text.text.splitlines()
    found = token_rules(kernel, text)
    if clang():
        found += clang_rules(kernel, text)
    for f in found:
        f.source = lines[f.line - 1] if 0 < f.line <= len(lines) else f.source
    return found


def token_rules(kernel, text):
    code = wrapper.blank_comments(text.text)
    line = lambda at: code.count("\n", 0, at) + 1  # noqa: E731
    body_start = sum(len(row) + 1 for row in text.text.split("\n")[: text.body_line - 1])
    found = []
    for kind, pattern, message in FORBIDDEN:
        found += [Finding(kind, message, line(m.start()), "") for m in re.finditer(pattern, code)]
    structs = re.findall(r"\bstruct\s+(\w+)", code)
    types = "|".join([TYPES, *structs, *(n for n, v in text.template if not isinstance(v, (int, bool)))])
    parameters = slice(code.find(f"void {text.function}("), body_start)
    for m in re.finditer(rf"\b(?:{types})\s*(?:const\s*)?([*&])+", code):
        if parameters.start <= m.start() < parameters.stop:
            continue
        start = max(code.rfind(c, 0, m.start()) for c in ";{}(,<") + 1
        before, after = code[start : m.start()], code[m.end() :]
        expression = re.match(r"\s*[\d(]|&", after) or re.search(r"[=+\-/.]|\breturn\b", before)
        if not expression and not any(re.search(rf"\b{s}\b", before) for s in SPACES):
            found.append(
                Finding("no-address-space", "a pointer or reference needs an address space", line(m.start()), "")
            )
    for m in re.finditer(rf"\b(?:{types}|auto)\s+({'|'.join(KEYWORDS)})\s*(?=[=;,)\[{{])", code):
        found.append(Finding("keyword-as-name", f"`{m.group(1)}` is a word of Metal", line(m.start(1)), ""))
    for name in [*kernel.input_names, *kernel.output_names, *(n for n, _ in text.template)]:
        if name in KEYWORDS or not re.fullmatch(r"[A-Za-z_]\w*", name):
            found.append(Finding("keyword-as-name", f"`{name}` cannot be the name of a parameter", 0, name))
    if not re.fullmatch(r"\w+", kernel.name):
        found.append(
            Finding("bad-name", f"the kernel name {kernel.name!r} is not part of an identifier", 0, kernel.name)
        )
    found += program_scope(wrapper.blank_comments(kernel.header), types)
    found += recursion(code[:body_start], line)
    header = wrapper.blank_comments(kernel.header)
    for a in wrapper.ATTRIBUTES:
        used = re.search(rf"\b{a}\b", header)
        parameter = re.search(rf"\bu(?:int|short)[23]?\s+{a}\b", header)
        if used and a not in text.attributes and not parameter:
            found.append(
                Finding(
                    "attribute-in-header",
                    f"{a} occurs in the header only: MLX does not declare it",
                    line(used.start()),
                    "",
                )
            )
    if len(text.parameters) > MAX_BUFFERS:
        found.append(Finding("buffer-limit", f"{len(text.parameters)} buffers, the limit is {MAX_BUFFERS}", 0, ""))
    if (
        not text.attributes
        and len(kernel.output_names) > 1
        and any(p.role not in ("input", "output") for p in text.parameters)
    ):
        found.append(
            Finding("no-attribute", "with two outputs and a shape MLX needs a thread attribute in the body", 0, "")
        )
    return found


def program_scope(header, types):
    """Variables of the header outside of functions and structs: they must be `constant`."""
    found, depth, start = [], 0, 0
    for at, c in enumerate(header):
        depth += (c in "{(") - (c in "})")
        if depth == 0 and c in ";}":
            statement = re.sub(r"^\s*#.*$", "", header[start:at], flags=re.M)
            if re.match(
                rf"\s*(?:(?:static|const|constexpr|inline|volatile)\s+)*(?:{types})\s+\w+\s*[=\[{{]?[^()]*$",
                statement,
            ):
                found.append(
                    Finding(
                        "program-scope",
                        "a variable outside of functions must be `constant`",
                        header.count("\n", 0, at) + 1,
                        "",
                    )
                )
            start = at + 1
    return found


def recursion(code, line):
    """Functions of the header that reach themselves."""
    calls, at = {}, {}
    for m in re.finditer(r"\b([A-Za-z_]\w*)\s*\(", code):
        end = wrapper.find_close(code, m.end() - 1)
        opening = re.match(r"\s*(?:const\s*|device\s*|thread\s*|constant\s*|threadgroup\s*)*\{", code[end + 1 :])
        if opening and m.group(1) not in ("if", "for", "while", "switch"):
            start = end + opening.end()
            body = code[start : wrapper.find_close(code, start, "{}")]
            calls.setdefault(m.group(1), set()).update(
                re.findall(r"\b([A-Za-z_]\w*)\s*(?:<[^;(){}]*>)?\s*\(", body)
            )
            at.setdefault(m.group(1), line(m.start()))
    found = []
    for name in calls:
        reached, todo = set(), [name]
        while todo:
            for callee in calls.get(todo.pop(), ()):
                if callee in calls and callee not in reached:
                    reached.add(callee)
                    todo.append(callee)
        if name in reached:
            found.append(Finding("recursion", f"{name} calls itself", at[name], ""))
    return found


SPACE = "__(?:global|local|private|constant)"
CLANG_KINDS = [  # searched in an error and its notes
    ("address-space", rf"address space|'{SPACE}'|{SPACE} .*{SPACE} "),
    ("ambiguous-call", r"call to '.*' is ambiguous"),
    ("variable-length-array", r"variable length array|array size is not a constant"),
    ("function-pointer", r"pointers to functions"),
    ("write-to-constant", r"read-only|const-qualified|non-const"),
]


def opencl_text(kernel, text):
    """The kernel as OpenCL C++: its parameters become variables, its template arguments names."""
    head = ['#include "metal_lint.h"', f'#line 1 "{build.KERNEL}"', kernel.header]
    for name, value in text.template:
        spelled = wrapper.template_value(value)
        kind = wrapper.template_kind(value)
        head.append(
            f"typedef {spelled} {name};"
            if kind == "typename"
            else f"constant constexpr {kind} {name} = {spelled};"
        )
    head.append("__kernel void msl_kernel() {")
    for p in text.parameters:
        get = f"*msl_any<{p.decl[:-1]}*>()" if p.decl.endswith("&") else f"msl_any<{p.decl}>()"
        head.append(f"{p.decl} {p.name} = {get};")
    for a in text.attributes:
        kind = "uint3" if a in wrapper.UINT3 else "uint"
        head.append(f"{kind} {a} = msl_any<{kind}>();")
    return "\n".join([*head, f'#line {text.body_line} "{build.KERNEL}"', kernel.source, "}"])


def clang_rules(kernel, text):
    command = [
        clang(),
        "-x",
        "clcpp",
        "-cl-std=CLC++2021",
        "-fsyntax-only",
        "-cl-no-stdinc",
        "-cl-single-precision-constant",
        "-Wno-everything",
        "-Werror=vla",
        "-I",
        str(build.SHIM / "lint"),
        "-fno-caret-diagnostics",
        "-",
    ]
    out = subprocess.run(command, input=opencl_text(kernel, text), capture_output=True, text=True)
    found = []
    for part in re.split(r"(?=^.*?:\d+:\d+: (?:fatal )?error: )", out.stderr, flags=re.M):
        m = re.match(r"(.*?):(\d+):\d+: (?:fatal )?error: (.*)", part)
        if m:
            kind = next((k for k, pattern in CLANG_KINDS if re.search(pattern, part)), "clang")
            line = int(m.group(2)) if m.group(1).endswith(build.KERNEL) else 0
            found.append(Finding(kind, m.group(3), line, "" if line else m.group(1)))
    if out.returncode and not found:
        found.append(Finding("clang", out.stderr.strip()[-500:], 0, ""))
    return found
