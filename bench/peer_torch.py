#!/usr/bin/env python3
"""DLRM in PyTorch, as somebody who knows PyTorch writes it: the peer of Chanter.

usage: bench/peer_torch.py RUN_DIR DATA.chp [--check N] [--window N] [--threads N] [--tolerance X]
                           [--device cpu|cuda]

RUN_DIR is a run of Chanter on DATA.chp (a prepared file) with run.save_initial: model.json says
what to train, init.safetensors what to start from, metrics.jsonl which losses have to come out.
Everything is in memory before the first iteration: weights, and the data as tensors, cut into
batches.

There are several ways to write the same model. Each is first checked against the losses of the run
(exit status 1 if one differs), which warms it up. One JSON line then names them. After that each
line on standard input, the name of a way, is answered by one timed window of it:
{"samples": ..., "seconds": ...}.
"""
import argparse
import itertools
import json
import os
import sys
import time
import warnings

# Chosen by a user for Chanter's libraries; those inside PyTorch and NumPy choose by themselves.
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402


class Refused(Exception):
    """Why there is nothing to measure, in one line."""


# --- what Chanter left ---------------------------------------------------------------------------

def read_safetensors(path):
    """All tensors of a safetensors file, {name: float32 array}: 8 bytes of length, JSON, data."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[slice(*d["data_offsets"])], "<f4").reshape(d["shape"])
            for name, d in header.items()}


def on_device(array, device):
    """A tensor of its own."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, copy=True)


def read_losses(path, n):
    """The losses of the first n iterations; fewer if the run was shorter."""
    with open(path) as f:
        events = [json.loads(line) for line in f]
    return [e["loss"] for e in events if e["event"] == "train"][:n]


def read_section(raw, at, dtype, shape):
    """The array at byte `at` of a prepared file, and where the next one begins."""
    n_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
    return raw[at:at + n_bytes].view(dtype).reshape(shape), at + -(-n_bytes // 64) * 64


def read_prepared(path, dense_features, tables, rows):
    """The first `rows` samples of a prepared file (docs/data.md), or all if it has fewer:
    dense (rows, dense_features) f32, ids (rows, tables) i64, labels (rows) f32."""
    raw = np.memmap(path, np.uint8, "r")
    if bytes(raw[:8]) != b"CHANTERP":
        raise Refused(f"{path}: not a prepared file; make one with chanter prepare")
    features, n_tables, per_block = (int(x) for x in raw[12:24].view("<u4"))
    if (features, n_tables) != (dense_features, tables):
        raise Refused(f"{path}: has {features} dense features and {n_tables} tables; the model "
                      f"wants {dense_features} and {tables}")
    rows = min(rows, int(raw[24:32].view("<u8")[0]))
    at, blocks = 64, []
    for _ in range(0, rows, per_block):
        n = int(raw[at + 8:at + 12].view("<u4")[0])
        dense, at = read_section(raw, at + 64, "<f4", (n, features))
        ids, at = read_section(raw, at, "<u4", (n, n_tables))
        labels, at = read_section(raw, at, "u1", (n,))
        blocks.append((dense, ids.astype(np.int64), labels.astype(np.float32)))
    return tuple(np.concatenate(parts)[:rows] for parts in zip(*blocks))


def make_batches(samples, model, n, device):
    """The first n batches, in file order; behind its end the file starts again. Ids modulo the rows
    of their tables; one contiguous array of ids for each table (tables, batch)."""
    dense, ids, labels = samples
    size, rows = model["global_batch"], len(labels)
    ids = ids % np.array(model["tables"])
    batches = []
    for i in range(n):
        at = np.arange(i * size, (i + 1) * size) % rows
        batches.append(tuple(on_device(a, device) for a in (dense[at], ids[at].T, labels[at])))
    return batches


# --- the model -----------------------------------------------------------------------------------

class SeparateTables(nn.Module):
    """One EmbeddingBag for each table, as facebookresearch/dlrm has it. A bag is one id."""

    def __init__(self, model, weights, batch):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weights[f"emb_l.{t}.weight"].clone(), freeze=False,
                                            mode="sum", sparse=True)
            for t in range(len(model["tables"])))
        self.register_buffer("offsets", torch.arange(batch))

    @staticmethod
    def arrange(ids):
        """Ids (tables, batch) as forward wants them."""
        return ids

    def forward(self, ids):
        """(batch, tables, dim)"""
        return torch.stack([bag(i, self.offsets) for bag, i in zip(self.bags, ids)], 1)


class MergedTable(nn.Module):
    """All tables below one another in one: one look-up, one gradient, one update. Faster, at the
    price that tables cannot be told apart any more."""

    def __init__(self, model, weights, batch):
        super().__init__()
        tables = [weights[f"emb_l.{t}.weight"] for t in range(len(model["tables"]))]
        self.rows = nn.Embedding.from_pretrained(torch.cat(tables), freeze=False, sparse=True)
        self.register_buffer("first", torch.tensor([0] + model["tables"][:-1]).cumsum(0))

    def arrange(self, ids):
        """Row numbers (batch, tables) in the merged table."""
        return (ids + self.first[:, None]).T.contiguous()

    def forward(self, ids):
        """(batch, tables, dim)"""
        return self.rows(ids)


def mlp(prefix, widths, weights, relu_at_end):
    """Linear and ReLU in turn; layer k is number 2 k, hence the names in the file."""
    layers = []
    for k, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(weights[f"{prefix}.{2 * k}.weight"])
            layer.bias.copy_(weights[f"{prefix}.{2 * k}.bias"])
        layers += [layer, nn.ReLU(inplace=True)]
    return nn.Sequential(*(layers if relu_at_end else layers[:-1]))


class Dense(nn.Module):
    """All but the tables: both MLPs, the interaction between them, the loss."""

    def __init__(self, model, weights, batch):
        super().__init__()
        dim, n = model["dim"], len(model["tables"]) + 1
        pairs = n * (n - 1) // 2
        self.bottom = mlp("bot_l", [model["dense_features"]] + model["bottom_mlp"], weights, True)
        self.top = mlp("top_l", [dim + pairs] + model["top_mlp"], weights, False)
        i, j = torch.tril_indices(n, n, -1)
        # gather: on a CPU twice as fast, with its backward, as z[:, i, j].
        self.register_buffer("below", (i * n + j).expand(batch, pairs))

    def forward(self, x, rows, labels):
        """Mean loss.  x (batch, dense_features)  rows (batch, tables, dim)  labels (batch)"""
        bottom = self.bottom(x)
        all_rows = torch.cat([bottom[:, None], rows], 1)
        dots = torch.bmm(all_rows, all_rows.transpose(1, 2)).flatten(1).gather(1, self.below)
        logits = self.top(torch.cat([bottom, dots], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def optimizers_of(model, tables, dense):
    """Chanter's formulas; Adagrad is element-wise, on rows, too. `fused` wants dense gradients."""
    lr = model["learning_rate"]
    if model["optimizer"] == "sgd":
        return (torch.optim.SGD(tables.parameters(), lr),
                torch.optim.SGD(dense.parameters(), lr, fused=True))
    if model["optimizer"] == "adagrad":
        eps = model["epsilon"]
        return (torch.optim.Adagrad(tables.parameters(), lr, eps=eps),
                torch.optim.Adagrad(dense.parameters(), lr, eps=eps, fused=True))
    raise Refused(f"torch.optim has no {model['optimizer']}; use sgd or adagrad")


class Training:
    """A model at its initial weights with its optimizers and its batches."""

    def __init__(self, model, weights, batches, table_kind, compiled):
        size = model["global_batch"]
        self.device = batches[0][0].device
        self.tables = table_kind(model, weights, size).to(self.device)
        self.dense = Dense(model, weights, size).to(self.device)
        self.optimizers = optimizers_of(model, self.tables, self.dense)
        self.loss_of = torch.compile(self.dense) if compiled else self.dense
        self.batches = [(x, self.tables.arrange(ids), y) for x, ids, y in batches]

    def step(self, batch):
        """One iteration; its loss, of before the update, as a tensor."""
        x, ids, labels = batch
        loss = self.loss_of(x, self.tables(ids), labels)
        loss.backward()
        for o in self.optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        return loss.detach()

    def finish(self):
        """Until the GPU has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def window(self):
        """Seconds for all batches once."""
        self.finish()
        start = time.perf_counter()
        for batch in self.batches:
            self.step(batch)
        self.finish()
        return time.perf_counter() - start


# --- check, measure ------------------------------------------------------------------------------

WAYS = {f"{tables}-{how}": (kind, how == "compile")
        for tables, kind in (("separate", SeparateTables), ("merged", MergedTable))
        for how in ("eager", "compile")}


def worst_difference(training, expected):
    """The largest relative difference of a loss from Chanter's. NaN counts as infinite."""
    got = [float(training.step(b)) for b, _ in zip(training.batches, expected)]
    apart = [abs(g - e) / abs(e) for g, e in zip(got, expected)]
    return max(d if d == d else float("inf") for d in apart)


def check_ways(model, weights, batches, losses, tolerance):
    """Every way to write the model, checked and warm, {name: Training}, and the largest difference
    of a loss."""
    ways, worst = {}, 0.0
    for name, way in WAYS.items():
        training = Training(model, weights, batches, *way)
        try:
            apart = worst_difference(training, losses)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as e:
            print(f"peer_torch: {name} left out: {str(e).splitlines()[0]}", file=sys.stderr)
            continue
        if apart > tolerance:
            raise Refused(f"{name}: a loss is {apart:.2e} (relative) from Chanter's, more than "
                          f"{tolerance:g}: not the same training, no speed reported")
        ways[name] = training
        worst = max(worst, apart)
    return ways, worst


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("run_dir", metavar="RUN_DIR", help="a run of Chanter with run.save_initial")
    ap.add_argument("data", metavar="DATA.chp", help="the prepared file it was trained on")
    ap.add_argument("--check", type=int, default=50, help="iterations whose losses must agree")
    ap.add_argument("--window", type=int, default=100, help="iterations of a timed window")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--tolerance", type=float, default=5e-5, help="relative, of a loss")
    ap.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = ap.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("this PyTorch sees no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32, as on Chanter's side
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    torch.set_num_threads(args.threads)
    with open(f"{args.run_dir}/model.json") as f:
        model = json.load(f)
    losses = read_losses(f"{args.run_dir}/metrics.jsonl", min(args.check, args.window))
    weights = {name: on_device(w, args.device) for name, w in
               read_safetensors(f"{args.run_dir}/init.safetensors").items()}
    samples = read_prepared(args.data, model["dense_features"], len(model["tables"]),
                            args.window * model["global_batch"])
    batches = make_batches(samples, model, args.window, args.device)
    ways, worst = check_ways(model, weights, batches, losses, args.tolerance)
    print(json.dumps({"ways": list(ways), "loss_iterations": len(losses), "loss_difference": worst,
                      "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"samples": len(batches) * model["global_batch"],
                          "seconds": ways[line.strip()].window()}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (Refused, OSError, KeyError) as e:
        sys.exit(f"peer_torch: {e}")
