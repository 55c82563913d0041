"""Where a command computes and by when: the knobs of `runtime.Policy`, --deadline, --late, --lighter."""

from mlx_cosyh3 import deadline, runtime
from mlx_cosyh3.errors import CosyH3Error


def add_arguments(parser, lighter=True):
    """The options, in a group of their own. lighter: also --lighter, for a command that loads one model."""
    group = parser.add_argument_group("where it runs, and by when")
    group.add_argument("--deadline", type=float, metavar="S",
                       help="seconds in which the beginning (where it streams) or all of it is to be there; for that "
                       "it may use another device, lighter weights, fewer steps of the flow")  # fmt: skip
    late = "what if that cannot be: refuse it before the work starts, or do one's best (refuse)"
    group.add_argument("--late", metavar="refuse|best", help=late)
    if lighter:
        group.add_argument("--lighter", metavar="DIR_OR_REPO",
                           help="the same model quantised, for a deadline that it cannot meet itself; both take "
                           "memory")  # fmt: skip
    runtime.add_arguments(group)


def options(args):
    """{"policy", "deadline", "late"} for `generate` and its relatives, checked; MLX knows the bound on memory then.

    Raises CosyH3Error for a bad value, and for what goes with --deadline alone."""
    for name in ("late", "lighter"):
        if getattr(args, name, None) is not None and args.deadline is None:
            raise CosyH3Error(f"--{name} goes with --deadline: give one, or leave it out")
    late = args.late or "refuse"
    deadline.check(args.deadline, late)
    policy = runtime.from_arguments(args)
    policy.apply()
    return {"policy": policy, "deadline": args.deadline, "late": late}
