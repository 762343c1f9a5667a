"""Makes the reference pages from the sources: the C headers' declarations and the Python package's docstrings.
Standard library only.

A header is a sequence of paragraphs that blank lines separate; each is a comment, declarations, or a comment
with the declarations it is about. A Python module is read with `ast`, not imported, so that no library has to
be built."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

HEADERS = ROOT / "include" / "opaq"
PACKAGE = ROOT / "python" / "opaq"
SUBMODULES = ("functional", "recipe", "runner", "checkpoint")
# The modules that users name in other libraries' configurations, and their names for that.
INTEGRATIONS = {
    "transformers": ("Config",),
    "vllm": ("Options", "register"),
    "torchtitan": ("linear",),
    "megatron": ("OpaqSpecProvider", "OpaqColumnParallelLinear", "OpaqRowParallelLinear"),
    "peft": ("LoraQuantizedLinear",),
}
REFUSED = ("unknown", "unsupported")  # **keywords of this name are refused, with a hint
OVERRIDES = ("extra_repr", "fsdp_pre_all_gather", "fsdp_post_all_gather")  # methods that only PyTorch calls

# ------------------------------------------------------------------------------------------------ C headers

PLUMBING = re.compile(
    r"#ifdef __cplusplus\n.*?#endif\n|#include [^\n]*\n|#ifndef OPAQ_\w+_H\n#define OPAQ_\w+_H\n", re.S
)
SECTION = re.compile(r"/\* -{4} .* -{4} \*/")
NAMES = re.compile(r"^#define (OPAQ_\w+)|^(?:struct|enum) (opaq_\w+) ?\{|\b(opaq_\w+)\(", re.M)


def escape(text: str) -> str:
    """A comment as Markdown: only backticks and indented examples are markup."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("    "):
            lines.append(line)
            continue
        parts = re.split(r"(`[^`]*`)", line)
        kept = [part if part.startswith("`") else re.sub(r"([*<\\[\]])", r"\\\1", part) for part in parts]
        lines.append(re.sub(r"\bdocs/(\w+\.md)\b", r"[docs/\1](../\1)", "".join(kept)))
    return "\n".join(lines)


def comment_text(comment: str) -> str:
    lines = comment.removeprefix("/*").removesuffix("*/").split("\n")
    return "\n".join(re.sub(r"^ ?\* ?", "", line).rstrip() for line in lines).strip()


def paragraphs(source: str) -> Iterator[str]:
    """Splits at blank lines outside of braces and comments."""
    held: list[str] = []
    depth = 0
    in_comment = False
    for line in source.split("\n"):
        if not line.strip() and depth == 0 and not in_comment:
            if held:
                yield "\n".join(held)
            held = []
            continue
        held.append(line)
        code = re.sub(r"/\*.*?\*/", "", line)
        in_comment = "*/" not in code if in_comment else "/*" in code
        depth += 0 if in_comment else code.count("{") - code.count("}")
    if held:
        yield "\n".join(held)


def without_export(code: str) -> str:
    """Declarations without OPAQ_API, their continuation lines moved to the left by as much."""
    macro = "OPAQ_API "
    out = []
    is_shifted = False
    for line in code.strip("\n").split("\n"):
        if line.startswith(macro):
            is_shifted = True
            out.append(line.removeprefix(macro))
        else:
            out.append(line.removeprefix(" " * len(macro)) if is_shifted else line)
        is_shifted = is_shifted and not line.endswith(";")
    return "\n".join(out)


def header_page(path: Path) -> str:
    source = PLUMBING.sub("", path.read_text())
    source = re.sub(r"\n#endif\s*$", "\n", source)
    opening, rest = source.split("*/", 1)
    purpose = comment_text(opening + "*/")
    what, more = re.match(r"opaq/\w+\.h: (.*?)\.(?:\s+(.*))?$", purpose, re.S).groups(default="")  # type: ignore[union-attr]
    out = [f"# opaq/{path.name}\n", f"For C programs: {escape(what)}.\n"]
    out.append(f"```c\n#include <opaq/{path.name}>\n```\n")
    if more:
        out.append(escape(more) + "\n")
    for paragraph in paragraphs(rest):
        if SECTION.fullmatch(paragraph):
            continue
        match = re.match(r"/\*.*?\*/\n?", paragraph, re.S)
        code = paragraph[match.end() :] if match else paragraph
        declared = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
        names = [next(filter(None, found)) for found in NAMES.findall(declared)]
        if names:
            out.append("## " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)) + "\n")
        if match:
            out.append(escape(comment_text(match.group(0).strip())) + "\n")
        if code.strip():
            out.append(f"```c\n{without_export(code)}\n```\n")
    return "\n".join(out)


# --------------------------------------------------------------------------------------------------- Python


class Module:
    """The top-level definitions of a module, and the modules that it imports other names from."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.definitions: dict[str, ast.AST] = {}
        self.imports: dict[str, str] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for inner in node.body:
                    self._import(inner)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.definitions[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.definitions[node.target.id] = node.value
            else:
                self._import(node)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.module:
            self.imports |= {alias.name: node.module for alias in node.names}

    def names(self) -> list[str]:
        """`__all__`, or the names defined here without an underscore."""
        listed = self.definitions.get("__all__")
        if listed is not None:
            return [str(name) for name in ast.literal_eval(ast.unparse(listed))]
        kinds = (ast.ClassDef, ast.FunctionDef)
        return [n for n, node in self.definitions.items() if isinstance(node, kinds) and n[0] != "_"]


def module_path(name: str) -> Path:
    parts = name.split(".")[1:]
    path = PACKAGE.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class _Constants(ast.NodeTransformer):
    """Replaces names of a module's constants by their values."""

    def __init__(self, owner: Module) -> None:
        self.owner = owner

    def visit_Name(self, node: ast.Name) -> ast.AST:
        owner = self.owner
        while node.id not in owner.definitions and owner.imports.get(node.id, "").startswith("opaq."):
            owner = Module(module_path(owner.imports[node.id]))
        value = owner.definitions.get(node.id)
        return value if isinstance(value, ast.Constant | ast.Tuple) else node


def default_text(value: ast.expr, owner: Module) -> str:
    return ast.unparse(_Constants(owner).visit(value))


def signature(function: ast.FunctionDef, owner: Module, skip_self: bool) -> str:
    parts: list[str] = []
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        parts.append(argument.arg + (f"={default_text(default, owner)}" if default else ""))
    if skip_self and parts:
        parts = parts[1:]
    if given.vararg:
        parts.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        parts.append("*")
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if not argument.arg.startswith("_"):
            parts.append(argument.arg + (f"={default_text(value, owner)}" if value else ""))
    if given.kwarg and given.kwarg.arg not in REFUSED:
        parts.append(f"**{given.kwarg.arg}")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({', '.join(parts)}){returns}"


def shown(declaration: str) -> str:
    """A declaration as a block of code, broken into lines that fit a page."""
    lines = textwrap.wrap(
        declaration, 88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "```text\n" + "\n".join(lines) + "\n```\n"


def docstring(node: ast.AST) -> str:
    text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module) else None
    return escape(text) + "\n" if text else ""


def decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def fields(node: ast.ClassDef, owner: Module) -> str:
    """The constructor of a dataclass or a named tuple, as its annotated fields give it."""
    parts: list[str] = []
    keywords: list[str] = []
    for item in node.body:
        if (
            not isinstance(item, ast.AnnAssign)
            or not isinstance(item.target, ast.Name)
            or item.target.id[0] == "_"
        ):
            continue
        value, named = item.value, parts
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            value, named = given.get("default"), keywords if "kw_only" in given else parts
        named.append(item.target.id + (f"={default_text(value, owner)}" if value else ""))
    return f"({', '.join([*parts, *(['*'] if keywords else []), *keywords])})"


def members(node: ast.ClassDef) -> str:
    """The members of an enumeration."""
    names = [
        item.targets[0].id
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    ]
    return f"Members: {', '.join(f'`{name}`' for name in names)}.\n"


def is_private(constructor: ast.FunctionDef) -> bool:
    """Whether it takes only arguments without a name: `(*_, **__)`."""
    given = constructor.args
    return len(given.args) <= 1 and given.vararg is not None and set(given.vararg.arg) == {"_"}


def class_entry(title: str, node: ast.ClassDef, owner: Module) -> Iterator[str]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    constructor = next((item for item in methods if item.name == "__init__"), None)
    is_record = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    is_record |= any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    made = fields(node, owner) if is_record else ""
    if constructor and not is_private(constructor):
        made = signature(constructor, owner, True).split(" -> ")[0]
    yield shown(f"class {title}{made}")
    yield docstring(node)
    if any(ast.unparse(base) == "Enum" for base in node.bases):
        yield members(node)
    for method in methods:
        if method.name[0] == "_" or method.name in OVERRIDES:
            continue
        if not ast.get_docstring(method):
            raise SystemExit(f"docs_reference.py: {title}.{method.name} is public and has no docstring")
        given = decorators(method)
        if any("property" in name for name in given):
            title = f"{method.name}: {ast.unparse(method.returns) if method.returns else ''}"
        else:
            title = method.name + signature(method, owner, "staticmethod" not in given)
        yield f"**`{title}`**\n"
        yield docstring(method)


def entries(module: Module, prefix: str) -> Iterator[str]:
    for name in sorted(module.names(), key=str.lower):
        if prefix == "opaq" and name in SUBMODULES:
            continue
        owner = module
        while name not in owner.definitions and name in owner.imports:
            owner = Module(module_path(owner.imports[name]))
        node = owner.definitions.get(name)
        title = f"{prefix}.{name}"
        if isinstance(node, ast.ClassDef):
            yield f"## `{title}`\n"
            yield from class_entry(title, node, owner)
        elif isinstance(node, ast.FunctionDef):
            yield f"## `{title}`\n"
            yield shown(f"{title}{signature(node, owner, False)}")
            yield docstring(node)
        elif isinstance(node, ast.Name):
            yield f"## `{title}`\n"
            yield f"The same as `{prefix}.{node.id}`.\n"
        else:
            raise SystemExit(f"docs_reference.py: {title} is public, but no definition of it was found")


def python_page(name: str) -> str:
    module = Module(module_path(name))
    lead = f"For Python programs: what `{name}` offers, from the docstrings in the sources.\n"
    return "\n".join([f"# {name}\n", lead, docstring(module.tree), *entries(module, name)])


def integrations_page() -> str:
    """Without the methods, which the other libraries call."""
    package = Module(module_path("opaq.integrations"))
    out = [
        "# opaq.integrations\n",
        "For programs that use opaq inside another library.\n",
        docstring(package.tree),
    ]
    for name, names in INTEGRATIONS.items():
        prefix = f"opaq.integrations.{name}"
        module = Module(module_path(prefix))
        out += [f"## `{prefix}`\n", docstring(module.tree)]
        for entry in names:
            node = module.definitions[entry]
            out.append(f"### `{prefix}.{entry}`\n")
            if isinstance(node, ast.FunctionDef):
                out.append(shown(f"{entry}{signature(node, module, False)}"))
            out.append(docstring(node))
    return "\n".join(out)


# ---------------------------------------------------------------------------------------------------- pages


def examples_page() -> str:
    out = [
        "# Examples\n",
        "For people who learn from whole programs: the files in `examples/`, as they are tested.\n",
    ]
    kinds = {".c": "c", ".py": "python", ".cpp": "cpp"}
    for path in sorted((ROOT / "examples").iterdir(), key=lambda path: (path.suffix == ".cpp", path.name)):
        if path.suffix in kinds:
            out.append(f"## {path.name}\n\n```{kinds[path.suffix]}\n{path.read_text()}```\n")
    return "\n".join(out)


def reference_pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    pages = {
        f"reference/c_{path.stem}.md": header_page(path) for path in HEADERS.glob("*.h") if path.stem != "opaq"
    }
    pages["reference/python.md"] = python_page("opaq")
    pages |= {f"reference/python_{name}.md": python_page(f"opaq.{name}") for name in SUBMODULES}
    pages["reference/python_integrations.md"] = integrations_page()
    pages["reference/examples.md"] = examples_page()
    return pages
