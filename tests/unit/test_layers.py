"""The floors of the house as a table, and what follows from it: read with `ast`, function-level imports included."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# Room -> floor. A file imports from its own room and from lower floors, never from another room of its own floor.
# The longest name that fits counts; "" is the root face, which loads everything on first use.
FLOORS = {
    "errors": 1,
    "version": 1,
    "boxes": 1,
    "structures": 2,
    "config": 2,
    "data": 3,
    "model": 3,
    "metrics": 3,
    "plots": 3,
    "engine": 4,
    "commands": 5,
    "": 5,
    "cli": 6,
    "__main__": 7,
    "train.py": 7,
}
# The folder is one room, but each verb stands alone.
SEPARATE_FILES = {"commands"}
# Files that use `accelerate` as a library; elsewhere its classes may appear in annotations only.
ACCELERATE_USERS = ("engine.distributed", "engine.launch", "commands.")
# Tested as subprocesses in tests/e2e.
WITHOUT_UNIT_TEST = ("__main__", "commands.")


@dataclass(frozen=True)
class Import:
    """One import of one file. `target` is a module of ours ("data.order"), or the first word of a foreign one."""

    target: str
    is_ours: bool
    for_types_only: bool
    line: int


def modules(repository: Path) -> dict[str, Path]:
    """Our modules by their name inside the package, and the root train.py; empty package faces are left out."""
    package = repository / "accel_yolo"
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] != "__init__" or path.read_text(encoding="utf-8").strip():
            found[name] = path
    if (repository / "train.py").is_file():
        found["train.py"] = repository / "train.py"
    return found


def imports(path: Path, package: Path) -> list[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.body
        for inner in ast.walk(child)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from_targets(node, path, package)
        for name in names:
            ours = name.split(".")[0] == "accel_yolo"
            target = name.partition(".")[2] if ours else name.split(".")[0]
            found.append(Import(target, ours, id(node) in for_types, node.lineno))
    return found


def _from_targets(node: ast.ImportFrom, path: Path, package: Path) -> list[str]:
    module = node.module or ""
    if node.level:
        folder = path.parents[node.level - 1].relative_to(package.parent)
        module = ".".join([*folder.parts, *([module] if module else [])])
    if module.split(".")[0] != "accel_yolo":
        return [module]
    folder = package.parent.joinpath(*module.split("."))
    # `from accel_yolo.data import order` names a module; `from accel_yolo.data.order import X` something inside one.
    is_module = {
        alias.name: (folder / f"{alias.name}.py").is_file() or (folder / alias.name).is_dir() for alias in node.names
    }
    return [f"{module}.{name}" if known else module for name, known in is_module.items()]


def room_of(module: str) -> str:
    return max((room for room in FLOORS if room == module or (room and module.startswith(f"{room}."))), key=len)


def law_breaks(repository: Path) -> list[str]:
    """One sentence for each import that breaks the table."""
    sentences = []
    for name, path in modules(repository).items():
        for item in imports(path, repository / "accel_yolo"):
            reason = _reason(name, item)
            if reason:
                sentences.append(f"{path.relative_to(repository)} line {item.line}: {reason}")
    return sentences


def _reason(name: str, item: Import) -> str:
    if not item.is_ours:
        allowed = item.target != "accelerate" or item.for_types_only or name.startswith(ACCELERATE_USERS)
        return "" if allowed else "imports accelerate, which only engine/distributed.py may use as a library"
    room, target_room = room_of(name), room_of(item.target)
    floor, target_floor = FLOORS[room], FLOORS[target_room]
    if name == item.target:
        return "imports itself"
    if target_floor > floor:
        return f"{name} (floor {floor}) climbs to {item.target or 'the root face'} (floor {target_floor})"
    if target_floor == floor and room != target_room:
        return f"{name} enters {item.target}: rooms of one floor do not import one another"
    if room == target_room and room in SEPARATE_FILES:
        return f"{name} imports {item.target}: each file of {room} stands alone"
    return ""


def circle(repository: Path) -> list[str]:
    """Modules that import one another in a ring, the first again at the end; empty if there is none."""
    ours = modules(repository)
    edges = {
        name: sorted(
            {item.target for item in imports(path, repository / "accel_yolo") if item.is_ours and item.target in ours}
        )
        for name, path in ours.items()
    }
    finished: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in finished:
            return []
        for target in edges[name]:
            if ring := search(target, [*way, name]):
                return ring
        finished.add(name)
        return []

    # The root face names its modules as texts, and `from accel_yolo import ...` loads one of them on demand.
    edges[""] = []
    return next((ring for name in edges if (ring := search(name, []))), [])


def without_test(repository: Path) -> list[str]:
    missing = []
    for name in modules(repository):
        *folders, last = name.split(".")
        if name in ("", "train.py") or name.startswith(WITHOUT_UNIT_TEST):
            continue
        test = Path("tests/unit", *folders, f"test_{last}.py")
        if not (repository / test).is_file():
            missing.append(f"{name} has no {test}")
    return missing


def test_every_import_falls_to_a_lower_floor():
    assert law_breaks(REPOSITORY) == []


def test_no_circle_closes():
    assert circle(REPOSITORY) == []


def test_every_module_has_its_test_file():
    assert without_test(REPOSITORY) == []


def test_every_module_has_a_floor():
    assert [name for name in modules(REPOSITORY) if room_of(name) == "" and name] == []


def house(tmp_path: Path, **files: str) -> Path:
    """A small repository: `data__order="import x"` becomes accel_yolo/data/order.py."""
    for name, text in files.items():
        path = tmp_path / "accel_yolo" / Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_climbing_import_is_seen_inside_a_function_too(tmp_path):
    root = house(tmp_path, engine__fit="", data__order="def f():\n    from accel_yolo.engine import fit")
    assert law_breaks(root) == ["accel_yolo/data/order.py line 2: data.order (floor 3) climbs to engine.fit (floor 4)"]


def test_a_neighbour_on_the_same_floor_is_seen(tmp_path):
    root = house(tmp_path, model__loss="", data__order="from accel_yolo.model.loss import DetectionLoss")
    assert "rooms of one floor" in law_breaks(root)[0]


def test_a_relative_import_is_seen(tmp_path):
    root = house(tmp_path, model__loss="", data__order="from ..model import loss", data__load="from .order import x")
    assert len(law_breaks(root)) == 1


def test_a_verb_that_imports_a_verb_is_seen(tmp_path):
    root = house(tmp_path, commands__val="", commands__train="import accel_yolo.commands.val")
    assert "stands alone" in law_breaks(root)[0]


def test_the_root_face_is_not_for_us(tmp_path):
    root = house(tmp_path, engine__fit="from accel_yolo import load_model")
    assert "the root face" in law_breaks(root)[0]


def test_accelerate_is_seen_except_for_types_and_in_its_own_files(tmp_path):
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from accelerate import Accelerator"
    root = house(
        tmp_path,
        engine__distributed="import accelerate",
        engine__fit=for_types,
        engine__evaluate="from accelerate.utils import gather",
    )
    assert [sentence.split()[0] for sentence in law_breaks(root)] == ["accel_yolo/engine/evaluate.py"]


def test_a_circle_in_one_room_is_seen(tmp_path):
    root = house(
        tmp_path,
        engine__a="import accel_yolo.engine.b",
        engine__b="def f():\n    from accel_yolo.engine.c import x",
        engine__c="from accel_yolo.engine import a",
    )
    assert circle(root) == ["engine.a", "engine.b", "engine.c", "engine.a"]


def test_a_module_without_its_test_is_seen(tmp_path):
    root = house(tmp_path, data__order="", commands__val="")
    assert without_test(root) == ["data.order has no tests/unit/data/test_order.py"]
