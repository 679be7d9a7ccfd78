"Every loader kind, shared out to simulated cores in one process: nothing lost, nothing twice but declared padding, the same steps everywhere"
from copy import deepcopy
import numpy as np, pandas as pd, pytest, torch
import torch.utils.data as D
from fastai.callback.data import PartialDL, WeightedDL
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader
from fastai.tabular.all import Categorify, TabularPandas
from fastai.text.data import LMDataLoader, SortedDL
from fastai_xla_extensions.data import RandomState, TPUDistributedDL, share_out

pytestmark = pytest.mark.quick
SIZES,CORES = (0, 1, 7, 31, 32, 33, 37), (1, 3, 4, 8)
BS = 4

class Sharded(D.IterableDataset):
    def __init__(self, its): self.its = its
    def __len__(self): return len(self.its)
    def __iter__(self): return iter(self.its)
    def shard(self, num_shards, index): return Sharded(self.its[index::num_shards])

def text(n): return [(torch.full((5 + i*7%11,), i),) for i in range(n)]
def pad(b):
    n = max(len(o[0]) for o in b)
    return [(torch.nn.functional.pad(o[0], (0, n-len(o[0])), value=-1),) for o in b]
def table(n): return TabularPandas(pd.DataFrame(dict(c=['a']*max(n,1), i=range(max(n,1)))), [Categorify], cat_names=['c'], cont_names=['i'])

# name: (loader of n items, batch -> item numbers, does each epoch have every item once?, does it allow drop_last?)
items = lambda n: list(range(n))
KINDS = {
    'plain':    (lambda n, drop: DataLoader(items(n), bs=BS, drop_last=drop), lambda b: b, True),
    'shuffled': (lambda n, drop: DataLoader(items(n), bs=BS, drop_last=drop, shuffle=True), lambda b: b, True),
    'tfmd':     (lambda n, drop: TfmdDL(items(n), bs=BS, drop_last=drop, shuffle=True, num_workers=0), lambda b: b, True),
    'prebatched': (lambda n, drop: DataLoader([torch.tensor([i]) for i in range(n)], bs=None), lambda b: b, True),
    'weighted': (lambda n, drop: WeightedDL(items(n), bs=BS, drop_last=drop, shuffle=True, num_workers=0, wgts=np.arange(1, n+1)), lambda b: b, False),
    'partial':  (lambda n, drop: PartialDL(items(n), bs=BS, drop_last=drop, shuffle=True, num_workers=0, partial_n=max(n-3, 1)), lambda b: b, False),
    'sorted':   (lambda n, drop: SortedDL(text(n), bs=BS, drop_last=drop, shuffle=n > 0, num_workers=0, before_batch=pad, do_setup=False, res=[len(o[0]) for o in text(n)]), lambda b: b[0][:,0], True),
    'sorted, in order': (lambda n, drop: SortedDL(text(n), bs=BS, drop_last=drop, num_workers=0, before_batch=pad, do_setup=False, res=[len(o[0]) for o in text(n)]), lambda b: b[0][:,0], True),
    'tabular':  (lambda n, drop: table(n).dataloaders(bs=BS).train.new(shuffle=True, drop_last=drop), lambda b: b[1][:,0], False),
    'torch':    (lambda n, drop: D.DataLoader(D.TensorDataset(torch.arange(n)), batch_size=BS, drop_last=drop, sampler=list(range(n))), lambda b: b[0], True),
    'torch, shuffled': (lambda n, drop: D.DataLoader(items(n), batch_size=BS, drop_last=drop, shuffle=n > 0), lambda b: b, True),
    'torch, batch sampler': (lambda n, drop: D.DataLoader(items(n), batch_sampler=[list(range(i, i+BS)) for i in range(0, n-BS+1, BS)]), lambda b: b, None),
    'torch, iterable': (lambda n, drop: D.DataLoader(Sharded(torch.arange(n)), batch_size=BS, drop_last=drop), lambda b: b, True),
}

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('pad_full', [True, False])
def test_shares(kind, pad_full):
    mk,ids,once = KINDS[kind]
    for n in SIZES:
        for drop in (False, True):
            if kind == 'prebatched' and drop or kind in ('tabular', 'weighted', 'partial') and n < 4 or kind.startswith('sorted') and n == 0: continue
            dl = mk(n, drop)
            for cores in CORES:
                if kind == 'torch, iterable' and 0 < n < cores and not drop: continue   # cores without an item have nothing to pad with: test_too_few
                state = RandomState()
                shares = []
                for r in range(cores):
                    s = deepcopy(dl) if isinstance(dl, DataLoader) else dl
                    shares.append(share_out(s, r, cores, pad=pad_full, draws=deepcopy(state)))
                for epoch in range(2):
                    got = [list(s) for s in shares]
                    steps = {len(g) for g in got} | {len(s) for s in shares}
                    assert len(steps) == 1, (n, cores, drop, steps)                       # the same number on all cores, and as `len` says
                    real = []
                    for k in range(steps.pop()):
                        sizes = {len(ids(g[k])) for g in got}
                        assert len(sizes) == 1, (n, cores, k, sizes)                      # one shape on all cores
                        if pad_full and kind != 'prebatched' and shares[0].bs: assert sizes == {BS}
                        step = [ids(s.trim(g[k], k)) if s.bs else ids(g[k]) if s.n_real(k) else [] for s,g in zip(shares, got)]
                        assert sum(map(len, step)) == (shares[0].n_global(k) if shares[0].bs else sum(s.n_real(k) for s in shares)*(BS if once is None else 1))
                        real += [int(i) for o in step for i in o]
                        pads = [int(i) for g in got for i in ids(g[k])]
                        if kind != 'torch, iterable' and once is not None: assert set(pads) <= {int(i) for o in step for i in o}  # padding repeats samples of the step
                    total = shares[0].n
                    if once: assert sorted(real) == sorted(set(real)), (n, cores)          # none twice
                    if once and not drop: assert sorted(real) == list(range(n)), (n, cores)  # none left out
                    if once is False: assert len(real) == (total if not drop else total//(BS*cores)*BS*cores)
                    if drop and once: assert len(real) == n//(BS*cores)*BS*cores

@pytest.mark.parametrize('cores', CORES)
def test_language_model(cores):
    "Rows go on from batch to batch on each core; all cores together read what one reads with the large batch"
    stream = [torch.arange(i*40, i*40+40) for i in range(11)]
    big = list(LMDataLoader(stream, bs=2*cores, seq_len=7))
    shares = [list(TPUDistributedDL(LMDataLoader(stream, bs=2, seq_len=7), r, cores)) for r in range(cores)]
    for k,(x,y) in enumerate(big):
        for r in range(cores): assert torch.equal(shares[r][k][0], x[r::cores]) and torch.equal(shares[r][k][1], y[r::cores])
    for r in range(cores):
        rows = torch.cat([x for x,_ in shares[r]], dim=1)
        assert (rows.diff(dim=1) == 1).all()

def test_too_few():
    with pytest.raises(ValueError, match='3 items, too few for 4 cores'): share_out(D.DataLoader(Sharded(torch.arange(3)), batch_size=BS), 0, 4)

def test_scale():
    "One core's share of an epoch over 20 million items on 256 cores: memory and time in proportion to the share"
    import tracemalloc
    class Many:
        def __len__(self): return 20_000_000
        def __getitem__(self, i): return i
    s = TPUDistributedDL(DataLoader(Many(), bs=64, shuffle=True), 7, 256)
    tracemalloc.start()
    idxs = s.get_idxs()
    peak = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
    assert len(idxs) == len(s)*64 and len(np.unique(idxs[:s.n_full*64])) == s.n_full*64
    assert peak < 20*8*len(idxs)   # a few arrays of the share; the whole order would be 256 times one
