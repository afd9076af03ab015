import cProfile, pstats, time, yaml, torch, sys
from engine import LLM
from engine.execution.model_runner import ModelRunner
config = yaml.safe_load(open("conf/model/qwen3_8b.yaml"))["config"]
plain = ModelRunner._rehearse
def timed(self):
    t = time.perf_counter(); torch.cuda.synchronize(); p = cProfile.Profile() if len(sys.argv) > 1 else None
    if p: p.enable()
    plain(self)
    if p: p.disable()
    t1 = time.perf_counter(); torch.cuda.synchronize(); print("rehearse", t1 - t, "sync", time.perf_counter() - t1)
    if p: pstats.Stats(p).sort_stats("tottime").print_stats(25); pstats.Stats(p).sort_stats("cumulative").print_stats(45)
ModelRunner._rehearse = timed
prepare = ModelRunner.prepare
def whole(self):
    t = time.perf_counter(); prepare(self); print("prepare", time.perf_counter() - t)
ModelRunner.prepare = whole
t = time.perf_counter()
llm = LLM(config, load_format="dummy", dtype="bfloat16", device="cuda", skip_tokenizer_init=True)
print("LLM", time.perf_counter() - t)
