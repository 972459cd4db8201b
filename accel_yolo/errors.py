"""The exceptions that a user can meet. Each says what is wrong, what was found, and how to fix it."""

from collections.abc import Mapping


class AccelYoloError(Exception):
    """An error that its reader can fix; the command line prints it and exits with code 2.

    Args:
        what: what is wrong, one sentence with a full stop.
        found: what was found: the value, the path, the file and line.
        fix: what to do about it.
    """

    def __init__(self, what: str, *, found: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        # A private subclass shows the name that users know.
        kind = next(cls.__name__ for cls in type(self).__mro__ if not cls.__name__.startswith("_"))
        return f"{kind}: {self.what}\n  found: {self.found}\n  fix:   {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and these errors cross process borders.
        return _rebuild, (type(self), self.what, self.found, self.fix)


class ConfigError(AccelYoloError):
    """A flag, a key or a value in the settings."""


class DataError(AccelYoloError):
    """A data YAML, an image or a label file."""


class WeightsError(AccelYoloError):
    """A weights file or a model configuration."""


class CheckpointError(AccelYoloError):
    """A run folder or a checkpoint in it."""


class TrainingError(AccelYoloError):
    """Something that went wrong with the numbers while training."""


class LaunchError(AccelYoloError):
    """The way in which the processes were started."""


def _rebuild(kind: type[AccelYoloError], what: str, found: str, fix: str) -> AccelYoloError:
    return kind(what, found=found, fix=fix)


def error_fields(error: AccelYoloError) -> dict[str, str]:
    """An error as JSON-ready fields, for another process; `rebuilt_error` is the reverse."""
    kind = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))
    return {"kind": kind, "what": error.what, "found": error.found, "fix": error.fix}


def rebuilt_error(fields: Mapping[str, str]) -> AccelYoloError:
    """The error that `error_fields` took apart, of its own class where that is known."""
    kinds = {kind.__name__: kind for kind in AccelYoloError.__subclasses__()}
    return kinds.get(fields["kind"], AccelYoloError)(fields["what"], found=fields["found"], fix=fields["fix"])


def did_you_mean(name: str, known: list[str] | tuple[str, ...]) -> str:
    """A sentence that names the known words nearest to `name`, or lists them all if none is near."""
    # difflib costs 10 ms of start-up and is wanted only when something is wrong.
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known are: " + ", ".join(sorted(known))
