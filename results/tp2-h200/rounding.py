"""How far bf16 takes a random Qwen3 of 64 narrow layers from its own fp32 logits, on one rank and on two: CPU, a minute.

python results/tp2-h200/rounding.py 64
"""
import sys, tempfile
from pathlib import Path
import torch
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import LLM
from engine.transformers_guard import import_transformers
def main():
    D=Path(tempfile.mkdtemp())
    cfg=dict(vocab_size=8192,hidden_size=512,intermediate_size=2560,num_hidden_layers=int(sys.argv[1]),num_attention_heads=8,num_key_value_heads=2,head_dim=64,rms_norm_eps=1e-6,rope_theta=1e6,max_position_embeddings=512,tie_word_embeddings=False,attention_bias=False,hidden_act="silu",initializer_range=0.063)
    t=import_transformers(); torch.manual_seed(0)
    m=t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model("qwen3",**cfg)).to(torch.bfloat16); m.save_pretrained(D); del m
    g=torch.Generator().manual_seed(1)
    prompts=[torch.randint(0,8192,(60,),generator=g).tolist() for _ in range(3)]; toks=[torch.randint(0,8192,(8,),generator=g).tolist() for _ in range(3)]
    out={}
    for name,kw in {"fp32":dict(dtype="float32"),"tp1":dict(dtype="bfloat16"),"tp2":dict(dtype="bfloat16",tensor_parallel_size=2)}.items():
        with LLM(str(D),device="cpu",skip_tokenizer_init=True,max_model_len=128,**kw) as llm:
            out[name]=torch.cat([llm.forced_logits(p,x).cpu().float() for p,x in zip(prompts,toks)])
    lp={k:v.log_softmax(-1) for k,v in out.items()}
    top=out["fp32"].abs().max().item()
    for a,b in (("tp1","fp32"),("tp2","fp32"),("tp1","tp2")):
        d=(lp[a]-lp[b]).abs(); print(sys.argv[1],a,b,"max %.4f mean %.5f share of largest logit %.4f"%(d.max(),d.mean(),d.max()/top),"argmax equal",(lp[a].argmax(-1)==lp[b].argmax(-1)).float().mean().item())
if __name__=="__main__": main()
