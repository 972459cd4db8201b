"""Every flag of YOLOv5's train and val is in our table: it works, or it is refused with a reason and a way out."""

import pytest

from accel_yolo.config.load import HYP_FIELDS, TRAIN, VAL, parse_train_args, parse_val_args, resolve, resolve_val
from accel_yolo.errors import ConfigError


def words(text: str) -> list[str]:
    return text.split()


YOLOV5_TRAIN = words("""
    --weights --cfg --data --hyp --epochs --batch-size --imgsz --img --img-size --rect --resume --nosave --noval
    --noautoanchor --noplots --evolve --evolve_population --resume_evolve --bucket --cache --image-weights --device
    --multi-scale --single-cls --optimizer --sync-bn --workers --project --name --exist-ok --quad --cos-lr
    --label-smoothing --patience --freeze --save-period --seed --local_rank --entity --upload_dataset --bbox_interval
    --artifact_alias
""")
YOLOV5_VAL = words("""
    --data --weights --batch-size --imgsz --img --img-size --conf-thres --iou-thres --max-det --task --device --workers
    --single-cls --augment --verbose --save-txt --save-hybrid --save-conf --save-json --project --name --exist-ok --half
    --dnn
""")
YOLOV5_HYP = words("""
    lr0 lrf momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr box cls cls_pw obj obj_pw iou_t anchor_t
    anchors fl_gamma label_smoothing hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr mosaic
    mixup copy_paste
""")
OURS = words("""
    --config --set --print-config --mixed-precision --ddp-timeout --bad-images --trackers --index-cache
    --no-channels-last --num-processes --watchdog
""")
REFUSED_TRAIN = {
    "evolve", "evolve_population", "resume_evolve", "bucket", "cache", "image_weights", "quad", "entity",
    "upload_dataset", "bbox_interval", "artifact_alias",
}  # fmt: skip
REFUSED_VAL = {"save_txt", "save_hybrid", "save_conf", "save_json", "dnn"}

TABLES = [
    (TRAIN, [*YOLOV5_TRAIN, *OURS], REFUSED_TRAIN, parse_train_args),
    (VAL, YOLOV5_VAL, REFUSED_VAL, parse_val_args),
]


def attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


@pytest.mark.parametrize(("table", "flags"), [(table, flags) for table, flags, _, _ in TABLES])
def test_the_table_has_every_flag(table, flags):
    missing = [flag for flag in flags if attribute(flag) not in table.by_attribute]
    assert missing == []


@pytest.mark.parametrize(("table", "refused"), [(table, refused) for table, _, refused, _ in TABLES])
def test_exactly_these_flags_are_refused_and_say_why_and_what_else(table, refused):
    assert {flag.attribute for flag in table.flags if flag.refused} == refused
    assert all(flag.instead for flag in table.flags if flag.refused)


@pytest.mark.parametrize(
    ("table", "name", "parse"), [(t, name, parse) for t, _, _, parse in TABLES for name in t.by_attribute]
)
def test_every_flag_is_read_with_dashes_and_with_underscores(table, name, parse):
    flag = table.by_attribute[name]
    is_switch = flag.switch or (flag.field and isinstance(table.fields[flag.field].default, bool))
    for spelling in (f"--{name}", f"--{name.replace('_', '-')}"):
        options = parse([spelling] if is_switch else [spelling, "1"])
        assert getattr(options, flag.attribute) is not None


@pytest.mark.parametrize("name", sorted(REFUSED_TRAIN))
def test_a_refused_flag_of_train_is_an_error_with_a_way_out(name):
    with pytest.raises(ConfigError) as caught:
        resolve(parse_train_args([f"--{name}"]))
    assert caught.value.what.startswith(TRAIN.by_attribute[name].spellings[0])
    assert caught.value.fix == TRAIN.by_attribute[name].instead


@pytest.mark.parametrize("name", sorted(REFUSED_VAL))
def test_a_refused_flag_of_val_is_an_error_with_a_way_out(name):
    with pytest.raises(ConfigError) as caught:
        resolve_val(parse_val_args(["--weights", "a.pt", f"--{name}"]))
    assert caught.value.fix == VAL.by_attribute[name].instead


@pytest.mark.parametrize("table", [TRAIN, VAL])
def test_every_field_of_the_table_exists_and_has_one_flag_at_most(table):
    fields = [flag.field for flag in table.flags if flag.field]
    assert set(fields) <= set(table.fields)
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize("table", [TRAIN, VAL])
def test_no_two_flags_share_a_name(table):
    names = [name for flag in table.flags for name in flag.spellings]
    assert len(names) == len(set(names))


def test_a_hyp_file_may_hold_every_key_of_yolov5():
    assert set(YOLOV5_HYP) <= set(HYP_FIELDS)


def test_a_key_of_a_hyp_file_means_one_setting():
    names = [name.partition(".")[2] for name in TRAIN.fields]
    assert [key for key in HYP_FIELDS if names.count(key) > 1] == []
