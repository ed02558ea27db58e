#!/usr/bin/env python3
"""Chanter beside PyTorch: the same training on the same cores, samples per second of both.

For each model, optimizer and mode of Chanter one JSON line on standard output; progress goes to
standard error. Exit status 1, and no speed, if losses or digests differ. docs/benchmarks.md says
what is measured. `make bench-peer` makes PyTorch's virtual environment and calls this program.
"""
import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KAGGLE = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
          14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]  # ids per column
MODELS = {  # iterations of one timed window: 10 to 30 s of two cores
    "A": {"dim": 16, "bottom_mlp": [512, 256, 64, 16], "top_mlp": [512, 256, 1], "iterations": 200},
    "B": {"dim": 48, "bottom_mlp": [1024, 1024, 512, 256, 64, 48],
          "top_mlp": [1024, 1024, 512, 256, 1], "iterations": 50},
}
# Adagrad's first steps are of size learning rate whatever the gradient, so a rounding in a gradient
# near 0 turns a whole step around. At 0.002 the losses of any two programs, in float64 too, part by
# 1e-2 within 50 iterations; at these rates by about 1e-5 at most, while tables that are not trained
# make a difference of 1e-4 or more. Speed does not depend on the rate.
LEARNING_RATE = {"sgd": 0.05, "adagrad": 0.00004}
COMMAND = {"embedded": "train", "launched": "launch"}
QUICK = {"iterations": 10, "rounds": 1, "models": "A", "optimizers": "sgd"}


def note(text):
    print(f"peer: {text}", file=sys.stderr, flush=True)


def write_config(path, model, optimizer, data, args):
    """Write Chanter's configuration of one comparison (JSON is YAML), without `data` that of the
    synthetic log to be prepared. Returns the iterations."""
    m = MODELS[model]
    n = args.iterations or m["iterations"]
    config = {
        "data": {"format": "prepared", "path": data} if data else
                {"format": "synthetic", "rows": n * args.batch},
        "model": {"kind": "dlrm", "dim": m["dim"], "bottom_mlp": m["bottom_mlp"],
                  "top_mlp": m["top_mlp"], "tables": [min(k, args.max_rows) for k in KAGGLE]},
        "train": {"global_batch": args.batch, "slices": 8, "iterations": n, "optimizer": optimizer,
                  "learning_rate": LEARNING_RATE[optimizer]},
        # A short lookahead: what the oracle has read before the first iteration is not timed.
        "oracle": {"lookahead": 10},
        "cluster": {"trainers": 1, "servers": 1, "threads": args.cores, "device": args.device},
        "run": {"save_final": False},
    }
    with open(path, "w") as f:
        json.dump(config, f, indent=1)
    return n


def chanter(args, command, *rest):
    """The last line of a command of Chanter, parsed."""
    run = subprocess.run([f"{args.bin}/chanter", command, *rest], stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"peer: chanter {command} failed with exit status {run.returncode}")
    return json.loads(run.stdout.strip().split("\n")[-1])


def train(args, config, mode, directory, *more):
    """One run of Chanter in `directory`, over what is there: its last line."""
    sets = [word for s in list(more) + args.set for word in ("--set", s)]
    return chanter(args, COMMAND[mode], config, "--run-dir", directory, "--overwrite", "--quiet",
                   *sets)


@contextlib.contextmanager
def torch_peer(args, run_dir, data, window):
    """The PyTorch program, after its losses were found to be those of the run: what it says of
    itself, and a function that lets it train one window in one way: samples per second."""
    command = [args.python, f"{ROOT}/bench/peer_torch.py", run_dir, data, "--window", str(window),
               "--check", str(args.check), "--threads", str(args.cores),
               "--tolerance", str(args.tolerance), "--device", args.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        def answer():
            line = p.stdout.readline()
            if not line:
                sys.exit("peer: no answer from PyTorch; see above")
            return json.loads(line)

        def speed(way):
            p.stdin.write(f"{way}\n")
            p.stdin.flush()
            r = answer()
            return r["samples"] / r["seconds"]

        yield answer(), speed


def compare(args, model, optimizer, data, top):
    """One model and optimizer: the check, then rounds in which every mode of Chanter and every way
    of PyTorch has its turn, so that whatever else the machine does meets all."""
    config, run_dir = f"{top}/config.yaml", f"{top}/checked"
    window = write_config(config, model, optimizer, data, args)
    note(f"model {model}, {optimizer}: initial weights and losses")
    digest = train(args, config, "embedded", run_dir, "run.save_initial=true")["digest"]
    with torch_peer(args, run_dir, data, window) as (told, torch_speed):
        note(f"model {model}, {optimizer}: losses agree to {told['loss_difference']:.1e}")
        ours = {mode: [] for mode in args.modes}
        theirs = {way: [] for way in told["ways"]}
        for i in range(args.rounds):
            for mode in args.modes:
                ours[mode].append(chanter_speed(args, config, mode, f"{top}/timed", digest))
            for way in theirs:
                theirs[way].append(torch_speed(way))
            last = {name: round(runs[-1]) for name, runs in (ours | theirs).items()}
            note(f"round {i + 1} of {args.rounds}, samples/s: {last}")
    for mode in args.modes:
        report(args, model, optimizer, mode, ours[mode], theirs, told)


def chanter_speed(args, config, mode, directory, digest):
    """Samples per second of one run, which must have learnt what the compared run did."""
    result = train(args, config, mode, directory)
    if result["digest"] != digest:
        sys.exit(f"peer: {mode}: digest {result['digest']}, not {digest} as in the run whose "
                 "losses were compared: no speed reported")
    return result["samples_per_s"]


def report(args, model, optimizer, mode, ours, theirs, told):
    """The result's line: PyTorch's speed is that of its fastest way."""
    medians = {way: round(statistics.median(runs), 1) for way, runs in theirs.items()}
    fastest = max(medians, key=medians.get)
    a, b = round(statistics.median(ours), 1), medians[fastest]
    print(json.dumps({
        "bench": "peer", "device": args.device, "model": model, "batch": args.batch,
        "cores": args.cores, "chanter_samples_per_s": a, "torch_samples_per_s": b, "mode": mode,
        "optimizer": optimizer, "ratio": round(a / b, 3), "n": args.rounds,
        "chanter_runs": ours, "torch_runs": [round(s, 1) for s in theirs[fastest]],
        "torch_way": fastest, "torch_ways": medians, "torch": told["torch"],
        "loss_iterations": told["loss_iterations"], "loss_difference": told["loss_difference"],
        "max_rows": args.max_rows, "set": args.set}), flush=True)


def pin(cores):
    """This process, and all that it starts, on the first `cores` processors that it may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < cores:
        sys.exit(f"peer: {cores} cores asked for, {len(allowed)} there; lower --cores")
    os.sched_setaffinity(0, allowed[:cores])


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--bin", default=f"{ROOT}/build/bin", help="where chanter is")
    ap.add_argument("--python", default=f"{ROOT}/build/peer-venv/bin/python",
                    help="one that has PyTorch")
    ap.add_argument("--models", default="AB", help="letters out of AB")
    ap.add_argument("--optimizers", default="sgd,adagrad")
    ap.add_argument("--modes", default="embedded,launched")
    ap.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of both sides")
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--cores", type=int, default=2, help="for each side, one after the other")
    ap.add_argument("--rounds", type=int, default=5, help="timed windows of each side")
    ap.add_argument("--iterations", type=int, help="of a window (200 for A, 50 for B)")
    ap.add_argument("--check", type=int, default=50, help="iterations whose losses must agree")
    ap.add_argument("--tolerance", type=float, default=5e-5, help="relative, of a loss")
    ap.add_argument("--max-rows", type=int, default=200000, help="of one table (1.5 M rows in all)")
    ap.add_argument("--data", help="a prepared file with 13 + 26 features (default: synthetic)")
    ap.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                    help="for Chanter, e.g. cluster.trainers=2; as often as needed")
    ap.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    args = ap.parse_args()
    if args.quick:
        ap.set_defaults(**QUICK)
        args = ap.parse_args()
    args.optimizers, args.modes = args.optimizers.split(","), args.modes.split(",")
    for given, known in ((args.models, MODELS), (args.optimizers, LEARNING_RATE),
                         (args.modes, COMMAND)):
        for name in given:
            if name not in known:
                ap.error(f"{name}: choose from {', '.join(known)}")
    return args


def main():
    args = arguments()
    if shutil.which(args.python) is None:
        sys.exit(f"peer: no {args.python}; make bench-peer makes it")
    pin(args.cores)
    with tempfile.TemporaryDirectory(prefix="chanter-peer-") as top:
        for model in args.models:
            data = args.data
            if data is None:
                data = f"{top}/data.chp"
                write_config(f"{top}/data.yaml", model, "sgd", None, args)
                chanter(args, "prepare", f"{top}/data.yaml", "--out", data, "--force")
            for optimizer in args.optimizers:
                compare(args, model, optimizer, data, top)


if __name__ == "__main__":
    try:
        main()
    except OSError as e:
        sys.exit(f"peer: {e}")
