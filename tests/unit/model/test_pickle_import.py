"""Tests of accel_yolo.model.pickle_import: honest files give their tensors, hostile ones nothing, and do nothing."""

import contextlib
import io
import os
import pickle
import sys
import tracemalloc
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_yolo.errors import WeightsError
from accel_yolo.model import pickle_import
from accel_yolo.model.pickle_import import read_yolov5_pickle

STRIDES = (8.0, 16.0)
ANCHORS = torch.tensor([[[1.25, 1.5], [2.0, 3.75]], [[3.0, 2.0], [4.5, 6.25]]])


class Detect(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.nc = num_classes
        self.stride = torch.tensor(STRIDES)
        self.register_buffer("anchors", ANCHORS.clone())
        self.m = nn.ModuleList(nn.Conv2d(4, 2 * (num_classes + 5), 1) for _ in STRIDES)


class DetectionModel(nn.Module):
    def __init__(self, names: object, num_classes: int = 3) -> None:
        super().__init__()
        self.yaml = {"nc": num_classes, "anchors": 2, "backbone": [[-1, 1, "Conv", [4, 3, 2]]], "head": []}
        self.names = names
        self.model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), Detect(num_classes)
        )


class IDetect(Detect):
    """The head of another family."""


@pytest.fixture(autouse=True)
def yolov5_classes(monkeypatch):
    """torch.save finds a class by its module's name; these live under YOLOv5's names while a test runs."""
    package, module = types.ModuleType("models"), types.ModuleType("models.yolo")
    for kind in (Detect, DetectionModel, IDetect):
        monkeypatch.setattr(kind, "__module__", "models.yolo")
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "models", package)
    monkeypatch.setitem(sys.modules, "models.yolo", module)


@pytest.fixture
def network() -> DetectionModel:
    torch.manual_seed(0)
    return DetectionModel({0: "cat", 1: "dog", 2: "owl"})


def save(path: Path, content: object, **options: object) -> Path:
    torch.save(content, path, **options)
    return path


def assert_same_tensors(imported: dict, expected: dict, *, atol: float = 0.0) -> None:
    assert list(imported) == list(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(
            imported[key], tensor.float() if tensor.is_floating_point() else tensor, atol=atol, rtol=0
        )


def write_archive(path: Path, program: bytes, storages: dict[str, bytes] | None = None, **options: object) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", program)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def refusal(path: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        read_yolov5_pickle(path)
    assert str(path) in caught.value.found
    return caught.value


def test_a_checkpoint_gives_the_tensors_of_its_module(tmp_path, network):
    path = save(tmp_path / "last.pt", {"epoch": 7, "model": network, "ema": None})
    imported = read_yolov5_pickle(path)
    assert_same_tensors(imported.state_dict, network.state_dict())
    assert imported.names == {0: "cat", 1: "dog", 2: "owl"}
    assert imported.num_classes == 3
    assert imported.strides == list(STRIDES)
    assert imported.config == network.yaml
    assert imported.epoch == 7
    assert imported.source_note == "model"
    assert torch.equal(imported.anchors_grid, ANCHORS)


def test_half_precision_becomes_float32_and_integers_stay(tmp_path, network):
    network.half()
    imported = read_yolov5_pickle(save(tmp_path / "half.pt", {"model": network, "epoch": -1}))
    assert_same_tensors(imported.state_dict, network.state_dict())
    assert imported.state_dict["model.0.1.num_batches_tracked"].dtype == torch.int64
    assert imported.state_dict["model.0.0.weight"].dtype == torch.float32
    assert imported.epoch is None


def test_ema_is_preferred_and_an_optimizer_is_not_in_the_way(tmp_path, network):
    raw = DetectionModel(["a", "b", "c"])
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9)
    sum(parameter.sum() for parameter in raw.parameters()).backward()
    optimizer.step()
    content = {"model": raw, "ema": network, "optimizer": optimizer.state_dict(), "opt": {"save_dir": Path("runs")}}
    imported = read_yolov5_pickle(save(tmp_path / "last.pt", content))
    assert imported.source_note == "ema"
    assert_same_tensors(imported.state_dict, network.state_dict())


@pytest.mark.parametrize(
    "wrap", [lambda net: {"ema": net}, lambda net: {"ema": (net, 12), "model": None}, lambda net: net]
)
def test_ema_alone_and_a_bare_module_are_read(tmp_path, network, wrap):
    assert_same_tensors(read_yolov5_pickle(save(tmp_path / "x.pt", wrap(network))).state_dict, network.state_dict())


def test_names_may_be_a_list_or_absent(tmp_path):
    listed = read_yolov5_pickle(save(tmp_path / "list.pt", {"model": DetectionModel(["a", "b", "c"])}))
    absent = read_yolov5_pickle(save(tmp_path / "none.pt", {"model": DetectionModel(None)}))
    assert listed.names == {0: "a", 1: "b", 2: "c"}
    assert absent.names == {0: "class0", 1: "class1", 2: "class2"}


def test_names_cannot_carry_terminal_sequences(tmp_path):
    imported = read_yolov5_pickle(save(tmp_path / "x.pt", {"model": DetectionModel(["\x1b[31mred", "été", 10**400])}))
    assert imported.names == {0: "?[31mred", 1: "été", 2: "class2"}


def test_anchor_grid_of_old_files_is_left_out(tmp_path, network):
    network.model[1].register_buffer("anchor_grid", torch.ones(2, 1, 2, 1, 1, 2))
    imported = read_yolov5_pickle(save(tmp_path / "old.pt", {"model": network}))
    assert not any("anchor_grid" in key for key in imported.state_dict)
    assert "model.1.anchors" in imported.state_dict


def test_non_persistent_buffers_are_left_out(tmp_path, network):
    network.model[1].register_buffer("grid", torch.ones(2), persistent=False)
    imported = read_yolov5_pickle(save(tmp_path / "x.pt", {"model": network}))
    assert_same_tensors(imported.state_dict, network.state_dict())


def test_a_module_in_dataparallel_loses_its_wrapper(tmp_path, network):
    imported = read_yolov5_pickle(save(tmp_path / "x.pt", {"model": nn.DataParallel(network)}))
    assert_same_tensors(imported.state_dict, network.state_dict())
    assert imported.names[0] == "cat"


@pytest.mark.parametrize("entry", [None, "model", "state_dict", "ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.model."])
def test_state_dicts_are_read_with_or_without_prefix(tmp_path, network, entry, prefix):
    state = OrderedDict((f"{prefix}{key}", value) for key, value in network.state_dict().items())
    imported = read_yolov5_pickle(save(tmp_path / "x.pt", state if entry is None else {entry: state}))
    assert_same_tensors(imported.state_dict, network.state_dict())
    assert imported.num_classes == 3
    assert imported.config == {}
    assert imported.strides == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_of_torch_save_is_read(tmp_path, network, protocol):
    path = save(tmp_path / "x.pt", {"model": network}, pickle_protocol=protocol)
    assert_same_tensors(read_yolov5_pickle(path).state_dict, network.state_dict())


def test_views_with_strides_and_shared_storages_are_read(tmp_path, network):
    state = dict(network.state_dict())
    shared = torch.arange(200.0)
    state["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    state["part"], state["other part"] = shared[5:15].view(2, 5), shared[100:]
    state["empty"], state["scalar"] = torch.empty(0, 4), torch.tensor(3.5)
    imported = read_yolov5_pickle(save(tmp_path / "x.pt", state)).state_dict
    assert_same_tensors(imported, state)
    assert all(tensor.is_contiguous() for tensor in imported.values())
    imported["part"].zero_()
    assert imported["other part"][0] == 100


def test_numpy_values_in_the_checkpoint_do_no_harm(tmp_path, network):
    np = pytest.importorskip("numpy")
    content = {"model": network, "best_fitness": np.array([0.5]), "score": np.float64(0.5)}
    assert read_yolov5_pickle(save(tmp_path / "x.pt", content)).num_classes == 3


@pytest.mark.parametrize(
    ("name", "num_classes", "first_name", "num_keys"),
    [
        ("yolov5n.pt", 80, "person", 349),
        ("yolov5n_v6.0.pt", 80, "person", 349),
        ("other/yolov5n_face_nc1_v6.1.pt", 1, "face", 349),
        ("other/yolov5n_pvdefect_nc5_autoanchor_v7.0.pt", 5, "black_core", 349),
    ],
)
def test_published_files_are_read(test_data_dir, name, num_classes, first_name, num_keys):
    imported = read_yolov5_pickle(test_data_dir / "weights" / name)
    assert (imported.num_classes, imported.names[0], len(imported.state_dict)) == (num_classes, first_name, num_keys)
    assert imported.strides == [8.0, 16.0, 32.0]
    assert imported.config["nc"] == num_classes
    assert imported.state_dict["model.0.conv.weight"].shape == (16, 3, 6, 6)
    assert all(bool(tensor.isfinite().all()) for tensor in imported.state_dict.values())


def test_anchors_come_from_the_network_and_not_from_its_yaml(test_data_dir):
    imported = read_yolov5_pickle(test_data_dir / "weights" / "other" / "yolov5n_pvdefect_nc5_autoanchor_v7.0.pt")
    pixels = imported.anchors_grid * torch.tensor(imported.strides).view(-1, 1, 1)
    torch.testing.assert_close(pixels[0], torch.tensor([[11.5, 51], [12.6, 91.8], [38.9, 33.3]]), atol=0.1, rtol=0)
    assert imported.config["anchors"][0] == [10, 13, 16, 30, 33, 23]


def test_published_files_that_are_broken_or_of_another_family_are_refused(test_data_dir):
    folder = test_data_dir / "weights" / "other"
    assert "damaged" in refusal(folder / "truncated_yolov5n.pt").what
    assert "Ultralytics" in refusal(folder / "not_yolov5_leyolo_nano.pt").what


class Shell:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


class Opener:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return eval, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_a_hostile_pickle_runs(tmp_path, network, protocol):
    sentinel = tmp_path / "sentinel"
    for number, attack in enumerate((Shell(f"touch {sentinel}"), Opener(sentinel))):
        program = pickle.dumps({"model": attack}, protocol=protocol)
        path = write_archive(tmp_path / f"{number}.pt", program)
        assert "system" in refusal(path).found or "eval" in refusal(path).found
    # Hidden beside an honest model, where a reader that only wants the model might not look.
    path = save(tmp_path / "hidden.pt", {"model": network, "hyp": Shell(f"touch {sentinel}")})
    assert "system" in refusal(path).found
    assert not sentinel.exists()


def test_names_of_known_packages_are_never_imported(tmp_path):
    assert "models.experimental" not in sys.modules
    program = b"cmodels.experimental\nattempt_load\n(S'weights.pt'\ntR."
    assert "seems to be" in refusal(write_archive(tmp_path / "x.pt", program)).what
    assert "models.experimental" not in sys.modules


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"}",
        b"garbage",
        b"\x80\x02N\x85.",
        b"\x80\x02h\x05.",
        b"\x80\x02(((.",
        b"\x80\x02]]s.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        # A method hidden in the name, an extension code, a buffer from outside, a text persistent id.
        b"ctorch\n_C.x y\n.",
        b"\x82\x01.",
        b"\x80\x05\x97.",
        b"Pname\n.",
        # A dictionary key whose hash takes 2**60 steps.
        b"\x80\x02}" + b"))" + b"\x86" + b"2\x86" * 60 + b"Ns.",
    ],
)
def test_broken_programs_are_refused(tmp_path, program):
    refusal(write_archive(tmp_path / "x.pt", program))


def test_bombs_are_refused_within_small_memory(tmp_path):
    bombs = {
        "memo of two thousand million": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "eight exabytes of bytes": b"\x80\x05\x8e" + b"\xff" * 7 + b"\x7f.",
        "nested lists": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
        "nested marks": b"\x80\x02" + b"(" * 20_000 + b".",
    }
    for name, program in bombs.items():
        path = write_archive(tmp_path / "x.pt", program)
        tracemalloc.start()
        refusal(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 * 2**20, name


def test_programs_of_too_many_steps_or_bytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_import, "_MAX_OPCODES", 1000)
    assert "opcodes" in refusal(write_archive(tmp_path / "x.pt", b"\x80\x02" + b"N0" * 600 + b"N.")).found
    monkeypatch.setattr(pickle_import, "_MAX_PROGRAM_BYTES", 1000)
    assert "bytes" in refusal(write_archive(tmp_path / "y.pt", b"\x80\x02" + b"N0" * 600 + b"N.")).found


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = write_archive(tmp_path / "x.pt", bytes(50 * 2**20), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    assert "compressed" in refusal(path).found
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_headers_that_lie_about_sizes_are_refused(tmp_path, network):
    with zipfile.ZipFile(save(tmp_path / "torch.pt", {"model": network})) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    # Written anew without the zip64 records of torch, so that the plain ones count.
    with zipfile.ZipFile(tmp_path / "honest.pt", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    assert read_yolov5_pickle(tmp_path / "honest.pt").num_classes == 3
    honest = (tmp_path / "honest.pt").read_bytes()
    directory = honest.rindex(b"PK\x05\x06")
    entry = honest.index(b"PK\x01\x02")
    # 24: the size of the unpacked entry, 20: of the packed one, 42: where it starts; 12 and 16: the directory's.
    for position, size in ((entry + 24, 4), (entry + 20, 4), (entry + 42, 4), (directory + 12, 4), (directory + 16, 4)):
        for lie in (b"\xf0\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x01\x00"):
            broken = bytearray(honest)
            broken[position : position + size] = lie
            path = tmp_path / "x.pt"
            path.write_bytes(broken)
            tracemalloc.start()
            refusal(path)
            assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
            tracemalloc.stop()


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path, network):
    path = save(tmp_path / "x.pt", {"model": network})
    content = bytearray(path.read_bytes())
    position = content.index(network.state_dict()["model.0.0.weight"].numpy().tobytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert "damaged" in refusal(path).what


def test_a_file_cut_anywhere_is_refused(tmp_path, network):
    content = save(tmp_path / "x.pt", {"model": network}).read_bytes()
    for length in range(0, len(content) - 1, max(1, len(content) // 40)):
        path = tmp_path / "cut.pt"
        path.write_bytes(content[:length])
        refusal(path)


def test_random_damage_never_escapes_as_another_error(tmp_path, network):
    buffer = io.BytesIO()
    torch.save({"model": network}, buffer)
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "x.pt"
    for _ in range(150):
        content = bytearray(buffer.getvalue())
        for position in torch.randint(len(content), (20,), generator=generator).tolist():
            content[position] = (content[position] + 77) % 256
        path.write_bytes(content)
        with contextlib.suppress(WeightsError):
            read_yolov5_pickle(path)


@pytest.mark.parametrize("names", [["../evil"], ["/etc/evil"], ["archive/../../evil"], ["archive\\..\\evil"]])
def test_entries_that_leave_the_archive_are_refused(tmp_path, names):
    path = write_archive(tmp_path / "x.pt", b"\x80\x02}.")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(names[0], b"evil")
    assert "leaves the archive" in refusal(path).found


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(tmp_path):
    path = write_archive(tmp_path / "x.pt", b"\x80\x02}.")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
    assert "one name" in refusal(path).found


def tensor_program(
    *, offset: int = 0, size: tuple = (4,), stride: tuple = (1,), numel: int = 4, key: str = "0"
) -> bytes:
    """A pickle of {"model.1.anchors": a tensor with these claims}."""

    class Storage:
        def __init__(self) -> None:
            self.identity = ("storage", torch.FloatStorage, key, "cpu", numel)

    class Claim:
        def __reduce__(self) -> tuple:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, OrderedDict())

    class Writer(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return value.identity if isinstance(value, Storage) else None

    stream = io.BytesIO()
    Writer(stream, protocol=2).dump({"model.1.anchors": Claim()})
    return stream.getvalue()


@pytest.mark.parametrize(
    "claims",
    [
        {"offset": 1},
        {"offset": -1},
        {"size": (5,)},
        {"stride": (2,)},
        {"stride": (-1,)},
        {"size": (2, 2), "stride": (1,)},
        {"size": (1_000_000,), "stride": (0,)},
        {"size": (2**70, 0), "stride": (1, 1)},
        {"numel": 2**40},
        {"numel": -1},
        {"numel": 5, "size": (5,)},
        {"key": "1"},
        {"key": "../data.pkl"},
    ],
)
def test_tensors_outside_their_storage_are_refused(tmp_path, claims):
    write_archive(tmp_path / "good.pt", tensor_program(), {"0": bytes(16)})
    assert "shape (4,)" in refusal(tmp_path / "good.pt").found
    path = write_archive(tmp_path / "x.pt", tensor_program(**claims), {"0": bytes(16)})
    assert "storage" in refusal(path).found


def test_one_storage_under_many_keys_cannot_fill_the_memory(tmp_path, network):
    state = dict(network.state_dict())
    large = torch.zeros(100_000)
    state |= {f"copy{number}": large for number in range(1000)}
    assert "more numbers" in refusal(save(tmp_path / "x.pt", state)).found


def test_modules_that_contain_each_other_come_to_an_end(tmp_path, network):
    child = nn.Module()
    for _ in range(30):
        parent = nn.Module()
        parent.a, parent.b = child, child
        child = parent
    network.model[0].add_module("bomb", child)
    assert "without end" in refusal(save(tmp_path / "tree.pt", {"model": network})).found
    loop = DetectionModel(None)
    loop.model[0].__dict__["_modules"]["self"] = loop
    assert "without end" in refusal(save(tmp_path / "loop.pt", {"model": loop})).found


def test_settings_that_contain_each_other_come_to_an_end(tmp_path, network):
    bomb: list = []
    for _ in range(30):
        bomb = [bomb, bomb]
    network.yaml["anchors"] = bomb
    assert "without end" in refusal(save(tmp_path / "x.pt", {"model": network})).found


def test_other_networks_are_refused_with_what_they_seem_to_be(tmp_path):
    other = DetectionModel(None)
    other.model[1] = IDetect(3)
    assert "YOLOv7" in refusal(save(tmp_path / "v7.pt", {"model": other})).what
    plain = nn.Sequential(nn.Linear(2, 2))
    assert "torch.nn.modules.container.Sequential" in refusal(save(tmp_path / "plain.pt", {"model": plain})).found
    assert "0.weight" in refusal(save(tmp_path / "state.pt", plain.state_dict())).found
    assert "lr, steps" in refusal(save(tmp_path / "dict.pt", {"lr": 1, "steps": 2})).found
    assert "list" in refusal(save(tmp_path / "list.pt", [1, 2])).found
    assert "MMDet" in refusal(write_archive(tmp_path / "mm.pt", b"cmmdet.models\nYOLOX\n.")).what


def test_a_state_dict_with_another_head_is_refused(tmp_path, network):
    state = network.state_dict() | {"model.1.ia.0.implicit": torch.zeros(1)}
    assert "model.1.ia.0.implicit" in refusal(save(tmp_path / "x.pt", state)).found
    network.model[1].m[0] = nn.Conv2d(4, 17, 1)
    assert "channels" in refusal(save(tmp_path / "y.pt", {"model": network})).found


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code", "ignore:.torch.jit.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_files_of_other_kinds_are_named(tmp_path, network):
    contents = {
        "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "web page": b"\n<!DOCTYPE html><html></html>",
        "empty": b"",
        "safetensors": b"\x10\0\0\0\0\0\0\0{}      ",
        "unknown kind": b"\x7fELF\x02\x01",
    }
    for word, content in contents.items():
        path = tmp_path / "x.pt"
        path.write_bytes(content)
        assert word in refusal(path).found
    with zipfile.ZipFile(tmp_path / "dataset.zip", "w") as archive:
        archive.writestr("images/1.jpg", b"")
    assert "something else" in refusal(tmp_path / "dataset.zip").what
    legacy = save(tmp_path / "legacy.pt", {"model": network}, _use_new_zipfile_serialization=False)
    assert "1.6" in refusal(legacy).fix
    script = tmp_path / "script.pt"
    torch.jit.script(nn.Linear(1, 1)).save(str(script))
    assert "TorchScript" in refusal(script).what
    assert "no file" in refusal(tmp_path / "missing.pt").found
    assert "folder" in refusal(tmp_path).found
