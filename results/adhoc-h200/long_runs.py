"""Long runs of the engine, and where a decode step's time goes. Dummy weights of the real shapes; JSON with provenance.

    python results/adhoc-h200/long_runs.py pool      --model qwen3_0_6b --out pool.json   # 2,000 requests
    python results/adhoc-h200/long_runs.py long      --model qwen3_0_6b --out long.json        # 8,192 + 32,768 tokens
    python results/adhoc-h200/long_runs.py soak      --model qwen3_0_6b --out soak.json --seconds 50
    python results/adhoc-h200/long_runs.py breakdown --model qwen3_8b   --out step.json --batch 16 --context 4096
    python results/adhoc-h200/long_runs.py prefill   --model qwen3_8b   --out prompts.json --batch 16 --context 4096
    python results/adhoc-h200/long_runs.py prefill   --model qwen3_32b  --out warm.json --batch 8 --context 16384 --shared 16128

Exit code 1 if what must hold does not. --device cpu --model tiny_qwen3 and smaller numbers try it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import yaml
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine import LLM, SamplingParams
from experiments import provenance
from tests.engine.soak import run_soak

MEBIBYTE = 1 << 20


class Sampler:
    """Memory of host and device over time."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.start, self.samples = llm, time.perf_counter(), []

    def take(self, **more) -> dict:
        sample = {"s": round(time.perf_counter() - self.start, 3), "rss_bytes": resident_bytes()}
        if self.llm.runner.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.llm.runner.device)
            sample |= {
                "device_used_bytes": total - free,
                "device_allocated_bytes": torch.cuda.memory_allocated(self.llm.runner.device),
                "device_reserved_bytes": torch.cuda.memory_reserved(self.llm.runner.device),
                "num_captures": self.llm.runner.graphs.num_captures if self.llm.runner.graphs else 0,
            }
        self.samples.append(sample | more)
        return sample

    def growth(self, name: str) -> int | None:
        """Bytes that the last third of the samples holds at most beyond the middle third."""
        values = [sample[name] for sample in self.samples if name in sample]
        third = len(values) // 3
        return max(values[-third:]) - max(values[third : 2 * third]) if third else None

    def growths(self) -> dict:
        names = ("rss_bytes", "device_used_bytes", "device_allocated_bytes")
        return {f"{name}_growth": self.growth(name) for name in names}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_llm(options: argparse.Namespace, **more) -> LLM:
    model = yaml.safe_load((ROOT / "conf" / "model" / f"{options.model}.yaml").read_text())["config"]
    start = time.perf_counter()
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=options.device,
        seed=options.seed,
        layer_fusion=options.layer_fusion,
        **more,
    )
    print(f"{options.model}: ready in {time.perf_counter() - start:.1f} s, {llm.runner.num_kv_blocks} KV blocks")
    return llm


def is_whole(llm: LLM) -> bool:
    """No block is held, and the books balance."""
    llm.engine.block_manager.check_invariants()
    return llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks


# --- parts --------------------------------------------------------------------------------------------------


def pool(options: argparse.Namespace) -> tuple[bool, dict]:
    """Requests of random lengths through a pool that holds a part of those that could run: all must finish."""
    rng = random.Random(options.seed)
    most = options.longest
    with open_llm(
        options, num_kv_blocks=options.blocks or 2500, max_model_len=2 * most, max_num_seqs=options.max_num_seqs
    ) as llm:
        vocab, engine, sampler = llm.engine.vocab_size, llm.engine, Sampler(llm)
        lengths = {}
        for _ in range(options.requests):
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(most // 32 + 1, most))]
            params = SamplingParams(temperature=0.6, max_tokens=rng.randint(most // 32 + 1, most), ignore_eos=True)
            lengths[engine.add_request(prompt, params)] = params.max_tokens
        given, finished, next_sample = {}, [], 0.0
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step_finished():
                given[output.request_id] = len(output.token_ids)
                finished.append(output.finish_reason)
            if time.perf_counter() - start >= next_sample:
                sampler.take(finished=len(finished), preemptions=engine.totals.num_preemptions)
                next_sample = time.perf_counter() - start + options.every
        elapsed = time.perf_counter() - start
        sampler.take(finished=len(finished), preemptions=engine.totals.num_preemptions)
        stats, whole = llm.stats(), is_whole(llm)
        result = {
            "elapsed_s": elapsed,
            "output_tok_s": stats["num_output_tokens"] / elapsed,
            "all_finished": given == lengths and set(finished) == {"length"},
            "pool_whole": whole,
            "stats": stats,
            **sampler.growths(),
            "samples": sampler.samples,
        }
    flat = all(
        (result[f"{name}_growth"] or 0) < options.growth_mib * MEBIBYTE for name in ("rss_bytes", "device_used_bytes")
    )
    ok = result["all_finished"] and whole and stats["num_preemptions"] > 0 and flat
    print(
        f"{len(finished)} of {options.requests} requests, {stats['num_preemptions']} preemptions, {elapsed:.1f} s, "
        f"{result['output_tok_s']:.0f} tok/s; pool whole: {whole}; growth: {sampler.growths()}"
    )
    return ok, result


def long(options: argparse.Namespace) -> tuple[bool, dict]:
    """One request up to the model's last position; stopped, and said to be so, after --limit-s."""
    rng = random.Random(options.seed)
    total = options.prompt_len + options.output_len
    with open_llm(options, max_model_len=total, max_num_seqs=1, num_kv_blocks=-(-total // 16)) as llm:
        engine, sampler = llm.engine, Sampler(llm)
        prompt = [rng.randrange(engine.vocab_size) for _ in range(options.prompt_len)]
        engine.add_request(
            prompt, SamplingParams(temperature=0.6, max_tokens=options.output_len, ignore_eos=True), "long"
        )
        start = before = time.perf_counter()
        before_tokens, output = 0, None
        while engine.has_unfinished_requests():
            for output in engine.step_finished():
                pass
            now, tokens = time.perf_counter(), engine.totals.num_output_tokens
            if tokens - before_tokens >= max(options.output_len // 16, 1):
                sampler.take(
                    context=options.prompt_len + tokens, step_ms=1e3 * (now - before) / (tokens - before_tokens)
                )
                print(
                    f"context {options.prompt_len + tokens}: {sampler.samples[-1]['step_ms']:.3f} ms a step", flush=True
                )
                before, before_tokens = now, tokens
            if now - start > options.limit_s and engine.has_unfinished_requests():
                engine.abort("long")
        for late in engine.step_finished():
            output = late
        whole = is_whole(llm)
        result = {
            "elapsed_s": time.perf_counter() - start,
            "finish_reason": output.finish_reason,
            "error": output.error,
            "prompt_tokens": len(output.prompt_token_ids),
            "output_tokens": len(output.token_ids),
            "total_tokens": len(output.prompt_token_ids) + len(output.token_ids),
            "ttft_s": output.metrics.ttft_s,
            "tpot_ms": 1e3 * (output.metrics.tpot_s or 0),
            "max_inter_token_ms": 1e3 * (output.metrics.max_inter_token_s or 0),
            "pool_whole": whole,
            "stats": llm.stats(),
            **sampler.growths(),
            "samples": sampler.samples,
        }
    print(
        f"{result['total_tokens']} tokens in {result['elapsed_s']:.1f} s: {result['finish_reason']}; "
        f"{result['tpot_ms']:.3f} ms a token; pool whole: {whole}; growth: {sampler.growths()}"
    )
    return result["finish_reason"] == "length" and result["total_tokens"] == total and whole, result


def soak(options: argparse.Namespace) -> tuple[bool, dict]:
    """Arrivals, aborts, preemptions, shared prefixes and cache resets for --seconds: memory and throughput flat."""
    with open_llm(
        options, num_kv_blocks=options.blocks or 1200, max_model_len=options.longest, max_num_seqs=options.max_num_seqs
    ) as llm:
        sampler = Sampler(llm)

        def memory() -> int:
            return sampler.take(stats=llm.stats())["rss_bytes"]

        done = run_soak(
            llm, options.seconds, memory, windows=15, seed=options.seed, clock=time.perf_counter, num_live=options.live
        )
        whole = is_whole(llm)
        rates = done.tokens_per_s
        middle, last = sum(rates[5:10]) / 5, sum(rates[10:]) / 5
        result = {
            "num_requests": done.num_requests,
            "num_aborted": done.num_aborted,
            "num_preemptions": done.num_preemptions,
            "num_resets": done.num_resets,
            "num_steps": done.num_steps,
            "num_ended": llm.stats()["num_finished"],
            "tokens_per_s": rates,
            "throughput_ratio": last / middle,
            "pool_whole": whole,
            "stats": llm.stats(),
            **sampler.growths(),
            "samples": sampler.samples,
        }
    flat = all(
        (result[f"{name}_growth"] or 0) < options.growth_mib * MEBIBYTE for name in ("rss_bytes", "device_used_bytes")
    )
    ended = sum(result["num_ended"].values()) == done.num_requests and "error" not in result["num_ended"]
    happened = min(done.num_aborted, done.num_preemptions) > 0
    print(
        f"{done.num_requests} requests, {done.num_aborted} aborted, {done.num_preemptions} preemptions, {done.num_steps} "
        f"steps; tokens/s late over middle: {last / middle:.3f}; pool whole: {whole}; growth: {sampler.growths()}"
    )
    return whole and ended and happened and flat and last > 0.9 * middle, result


def breakdown(options: argparse.Namespace) -> tuple[bool, dict]:
    """Where the time of a decode step goes: the kernels of a profile, and what lies between them."""
    rng = random.Random(options.seed)
    steps, warm_up = options.steps, 12
    with open_llm(
        options,
        max_model_len=options.context + 4 * steps + 2 * warm_up,
        max_num_seqs=options.batch,
        enforce_eager=options.eager,
        decode_attention=options.decode_attention,
    ) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=options.temperature, max_tokens=4 * steps + warm_up, ignore_eos=True)
        for _ in range(options.batch):
            engine.add_request([rng.randrange(engine.vocab_size) for _ in range(options.context)], params)

        def together() -> bool:
            return engine.last_step.num_decode_tokens == options.batch and not engine.last_step.num_prefill_tokens

        while not together():
            engine.step_finished()
        for _ in range(warm_up):
            engine.step_finished()
        assert together(), "the batch does not decode as one: a larger KV pool is needed"
        taken, start = [], time.perf_counter()
        for _ in range(2 * steps):
            engine.step_finished()
            taken.append(engine.last_step)
        wall_us = 1e6 * (time.perf_counter() - start) / len(taken)
        on_gpu = llm.runner.device.type == "cuda"
        if on_gpu:  # with overlap one step is under way: after this, exactly those launched below are traced
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as prof:
            for _ in range(steps):
                engine.step_finished()
            if on_gpu:
                torch.cuda.synchronize()
        assert together()
        kernel_name = llm.runner.kernels.decode.name
        captures = llm.runner.graphs.num_captures if llm.runner.graphs else 0
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in prof.events()
        if (event.device_type == DeviceType.CUDA if on_gpu else event.cpu_parent is None)
        and event.time_range.end > event.time_range.start
    ]
    mean = lambda name: 1e6 * sum(getattr(step, name) or 0.0 for step in taken) / len(taken)
    result = {
        "batch": options.batch,
        "context": options.context,
        "decode_attention": kernel_name,
        "num_captures": captures,
        "wall_us": wall_us,
        "host_us": mean("host_s"),
        "wait_us": mean("wait_s"),
        "device_us": mean("device_s") or None,
        "device_idle_us": mean("device_idle_s") if on_gpu else None,
        **tally(spans, steps),
    }
    show(result, options.top)
    return bool(spans), result


def prefill(options: argparse.Namespace) -> tuple[bool, dict]:
    """Where the time of prompts goes: --batch prompts of --context tokens, one token each, traced from first to last.

    --shared: so many first tokens are the same in all, and in the prefix cache before anything is timed.
    """
    rng = random.Random(options.seed)
    with open_llm(
        options, max_model_len=options.context + 1, max_num_seqs=options.batch, enable_prefix_caching=options.shared > 0
    ) as llm:
        engine = llm.engine
        on_gpu = llm.runner.device.type == "cuda"
        params = SamplingParams(temperature=options.temperature, max_tokens=1, ignore_eos=True)
        draw = lambda count: [rng.randrange(engine.vocab_size) for _ in range(count)]
        prefix = draw(options.shared)

        def submit() -> None:
            for _ in range(options.batch):
                engine.add_request(prefix + draw(options.context - options.shared), params)

        def drain() -> int:
            steps = 0
            while engine.has_unfinished_requests():
                engine.step_finished()
                steps += 1
            if on_gpu:
                torch.cuda.synchronize()
            return steps

        if options.shared:
            engine.add_request(prefix + draw(1), params)
            drain()
        walls = []
        for _ in range(3):
            start = time.perf_counter()
            submit()
            drain()
            walls.append(time.perf_counter() - start)
        hits = llm.stats()["num_cached_tokens"]
        submit()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as prof:
            steps = drain()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in prof.events()
        if (event.device_type == DeviceType.CUDA if on_gpu else event.cpu_parent is None)
        and event.time_range.end > event.time_range.start
    ]
    tokens = options.batch * options.context
    result = {
        "batch": options.batch,
        "context": options.context,
        "shared": options.shared,
        "num_cached_tokens": hits,
        "steps": steps,
        "wall_s": walls,
        "prefill_tok_s": [tokens / wall for wall in walls],
        **tally(spans, steps),
    }
    show(result, options.top)
    print([round(rate) for rate in result["prefill_tok_s"]], "tokens/s")
    return bool(spans), result


def tally(spans: list[tuple[str, float, float]], num_steps: int) -> dict:
    """Spans (name, start, end in us) of one stream, a step: time by name, time covered, and the gaps before each name.

    Kernels that overlap (dependent launches) are covered once; a gap is from the latest end so far to the next start.
    """
    spans = sorted(spans, key=lambda span: span[1])
    by_name, gaps = defaultdict(lambda: [0, 0.0]), defaultdict(lambda: [0, 0.0])
    busy, reached = 0.0, spans[0][1] if spans else 0.0
    first = reached
    for name, start, end in spans:
        by_name[name][0] += 1
        by_name[name][1] += end - start
        if start > reached:
            gaps[name][0] += 1
            gaps[name][1] += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - first

    def rows(table):
        ordered = sorted(table.items(), key=lambda item: -item[1][1])
        return [
            {"name": name, "calls": n / num_steps, "us_a_call": us / n, "us": us / num_steps}
            for name, (n, us) in ordered
        ]

    return {
        "traced_span_us": span / num_steps,
        "busy_us": busy / num_steps,
        "sum_us": sum(us for _, us in by_name.values()) / num_steps,
        "idle_share": 1 - busy / span if span else None,
        "kernels": rows(by_name),
        "gaps_before": rows(gaps),
    }


def show(result: dict, top: int) -> None:
    for title, rows in (("us a step in", result["kernels"]), ("us a step idle before", result["gaps_before"])):
        print(f"\n{title:>42} {'calls':>8} {'us/call':>9} {'us':>10}")
        for row in rows[:top]:
            print(f"{row['name'][:42]:>42} {row['calls']:8.1f} {row['us_a_call']:9.2f} {row['us']:10.2f}")
        print(f"{'all':>42} {sum(r['calls'] for r in rows):8.1f} {'':>9} {sum(r['us'] for r in rows):10.2f}")
    numbers = {k: v for k, v in result.items() if isinstance(v, float)}
    print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))


# --- command line -------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["pool", "long", "soak", "breakdown", "prefill"])
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model/")
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--blocks", type=int, help="pool, soak: KV blocks of 16 tokens; by default too few for all, 2500 and 1200"
    )
    parser.add_argument("--longest", type=int, default=512, help="pool: prompt and output at most; soak: together")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="pool, soak")
    parser.add_argument(
        "--growth-mib", type=float, default=64, help="pool, soak: memory that may grow in the last third"
    )
    parser.add_argument("--layer-fusion", default="off", help="as LLM(layer_fusion=...)")
    parser.add_argument("--requests", type=int, default=2000, help="pool")
    parser.add_argument("--every", type=float, default=1.0, help="pool: seconds between samples")
    parser.add_argument("--prompt-len", type=int, default=8192, help="long")
    parser.add_argument("--output-len", type=int, default=32768, help="long")
    parser.add_argument("--limit-s", type=float, default=240, help="long: aborted after so many seconds")
    parser.add_argument("--seconds", type=float, default=50, help="soak")
    parser.add_argument("--live", type=int, default=300, help="soak: requests kept in the engine")
    parser.add_argument("--batch", type=int, default=1, help="breakdown")
    parser.add_argument("--context", type=int, default=1024, help="breakdown")
    parser.add_argument("--shared", type=int, default=0, help="prefill: first tokens that are cached")
    parser.add_argument("--steps", type=int, default=20, help="breakdown: steps that are traced")
    parser.add_argument("--top", type=int, default=30, help="breakdown: rows printed")
    parser.add_argument("--temperature", type=float, default=0.6, help="breakdown")
    parser.add_argument("--eager", action="store_true", help="breakdown: without CUDA graphs")
    parser.add_argument("--decode-attention", default="auto", help="breakdown")
    options = parser.parse_args()
    device = torch.device(
        ("cuda:0" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    options.device = str(device)
    on_gpu = device.type == "cuda"
    record = provenance.capture(
        device,
        seed=options.seed,
        overrides=[],
        device_name=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        cwd=Path.cwd(),
    )
    record["command"] = shlex.join(["python", *sys.argv])
    ok, result = globals()[options.part](options)
    record |= {"gpu_after": provenance.gpu_state(device), "throttled_after": provenance.is_throttled(device)}
    content = {"part": options.part, "ok": ok, "options": vars(options), "result": result, "provenance": record}
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")
    print("ok" if ok else "NOT OK", out)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
