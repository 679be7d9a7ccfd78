"In SPMD mode the computation is split over the cores, not only the storage: read from the programs that XLA made"
import re
import pytest
from helpers import run_code

BS = 48   # of all 8 cores; no other dimension of the models below is a multiple of it

PROGRAM = '''
import os, sys
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.tabular.model import TabularModel
from fastai_xla_extensions.all import *
emulate_cores(8)
BS = 48
def dls(x, y):
    ds = list(zip(*x, y) if isinstance(x, tuple) else zip(x, y))
    return DataLoaders(DataLoader(ds[:2*BS], bs=BS), DataLoader(ds[2*BS:], bs=BS), device='cpu')
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 2, 36, dropout=0., batch_first=BATCH_FIRST)
        self.emb,self.enc,self.head = nn.Linear(6, 20),nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(20, 2)
    def forward(self, x):
        x = self.emb(x)
        x = self.enc(x) if BATCH_FIRST else self.enc(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))
def make(kind):
    set_seed(0)
    n,y = 3*BS,torch.randint(2, (3*BS,))
    if kind == 'mlp': x,m = torch.randn(n,20),nn.Sequential(nn.Linear(20,52), nn.ReLU(), nn.Linear(52,36), nn.ReLU(), nn.Linear(36,2))
    if kind == 'conv':
        x = torch.randn(n,3,6,6)
        m = nn.Sequential(nn.Conv2d(3,8,3,padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8,20,3,stride=2,padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20,2))
    if kind == 'transformer': x,m = torch.randn(n,5,6),Encoder()
    if kind == 'timm':
        import timm
        x,m = torch.randn(n,3,16,16),timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=20, depth=2, num_heads=2, num_classes=2)
    if kind == 'tabular':
        x,m = (torch.stack([torch.randint(7, (n,)), torch.randint(5, (n,))], 1), torch.randn(n,2)),TabularModel([(8,6), (6,4)], 2, 2, [52,36])
    return Learner(dls(x, y), m, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
import fastai_xla_extensions.spmd as spmd
spmd.small = 32   # elements: these are small models
ref,learn = make(KIND),make(KIND)
for l in (ref, learn): l.remove_cb(ProgressCallback); l.dls.train.rng.seed(1)
learn.to_spmd(MESH)
with learn.no_logging(), ref.no_logging(): learn.fit(2, 1e-3); ref.fit(2, 1e-3)
test_close(learn.recorder.values, ref.recorder.values, 1e-3)
if MESH[1] > 1: assert any(r.spec and 'fsdp' in r.spec for r in learn.sharding_summary())
print('finished')
'''

def _shapes(text):
    "Name -> dimensions, of all values of a program"
    return {m[1]: tuple(map(int, filter(None, m[2].split(',')))) for m in re.finditer(r'^\s*(?:ROOT )?(%?[\w.-]+) = \w+\[([\d,]*)\]', text, re.M)}

def heavy(text):
    "Dimensions of results and operands of every product and convolution"
    shapes = _shapes(text)
    for m in re.finditer(r'^\s*(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]\S* (dot|convolution|custom-call)\(([^)]*)\)(.*)$', text, re.M):
        if m[3] == 'custom-call' and 'matmul' not in m[5] and 'conv' not in m[5]: continue
        names = re.findall(r'%([\w.-]+)', m[4])
        yield m[3],[tuple(map(int, filter(None, m[2].split(','))))] + [s for n in names for s in [shapes.get(f'%{n}') or shapes.get(n)] if s]

@pytest.mark.parametrize('mesh', [(8,1), (4,2)])
@pytest.mark.parametrize('kind', ['mlp', 'conv', 'tabular', 'transformer', 'sequence first', 'timm'])
def test_split(kind, mesh, tmp_path):
    "No product or convolution over the whole batch on one core, and nothing that the compiler had to join against our will"
    k,first = ('transformer', False) if kind == 'sequence first' else (kind, True)
    out = run_code(PROGRAM.replace('KIND', repr(k)).replace('MESH', repr(mesh)).replace('BATCH_FIRST', repr(first)), timeout=280,
                   env={'XLA_FLAGS': f'--xla_dump_to={tmp_path} --xla_dump_hlo_as_text', 'TF_CPP_MIN_LOG_LEVEL': '0'})
    assert 'finished' in out
    assert 'Involuntary full rematerialization' not in out, [l for l in out.splitlines() if 'Involuntary' in l][:4]
    programs = [p.read_text() for p in tmp_path.glob('*after_optimizations.txt')]
    ops = [(op,s) for p in programs for op,s in heavy(p)]
    assert len(ops) >= 4, 'the program has no products?'
    whole = [(op,s) for op,s in ops if any(d % BS == 0 and d for dims in s for d in dims)]
    assert not whole, whole[:6]
