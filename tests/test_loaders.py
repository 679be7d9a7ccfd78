"Every kind of loader on several cores: the samples of one core with the large batch, and fastai's numbers"
from helpers import run_code

SETUP = '''
import sys, warnings
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.all import *
from fastai.data.load import DataLoader
from fastai_xla_extensions.all import *
n = N; emulate_cores(n)

def rel(a, b):
    a,b = [torch.cat([p.detach().flatten() for p in o.model.parameters()]) for o in (a, b)]
    return ((a-b).norm()/b.norm()).item()

def same(name, mk, bs=4, epochs=2, tol=1e-5, **kwargs):
    "xla_fit on n cores with `bs` against fastai on the CPU with `n*bs`: weights, losses and metrics. `mk(bs)` makes a learner"
    learns = []
    for b in (bs, n*bs):
        set_seed(7)
        l = mk(b)
        if hasattr(l, 'progress'): l.remove_cb(ProgressCallback)
        learns.append(l)
    l,r = learns
    if hasattr(l.dls.train, 'rng'):
        for o in learns: o.dls.train.rng.seed(1)
    before = rel(l, r)
    with l.no_logging(), r.no_logging():
        set_seed(3); l.xla_fit(epochs, **kwargs); after = np.random.rand()
        set_seed(3); r.fit(epochs)
        assert np.random.rand() == after   # the global generator is where fastai leaves it
    d = rel(l, r)
    print(f'{name}: weights {before:.1e} -> {d:.1e}', l.recorder.values[-1], r.recorder.values[-1])
    assert before == 0 and d <= tol, (name, d)
    for a,b in zip(l.recorder.values, r.recorder.values): assert all(p is q is None or abs(p-q) <= 1e-5*max(1,abs(q)) for p,q in zip(a, b)), (a, b)
    return l,r
'''

def run(code, n=4, **kw): return run_code(SETUP.replace('N;', f'{n};', 1) + code, timeout=240, **kw)

def test_tabular_and_collab():
    run('''
from fastai.tabular.all import *
from fastai.collab import *
rng = np.random.default_rng(0)
df = pd.DataFrame(dict(c=rng.choice(list('abcd'), 131), x=rng.normal(size=131), y=rng.normal(size=131)))
df['t'] = np.where(df.x + (df.c=='a') > .3, 'yes', 'no')
def tab(bs):
    to = TabularPandas(df, [Categorify, FillMissing, Normalize], cat_names=['c'], cont_names=['x','y'], y_names="t", y_block=CategoryBlock(), splits=(list(range(100)), list(range(100,131))))
    return tabular_learner(to.dataloaders(bs=bs), layers=[8], n_out=2, config=tabular_config(use_bn=False, bn_cont=False), metrics=[accuracy, F1Score()], opt_func=SGD, lr=.1)
same('tabular', tab)

ratings = pd.DataFrame(dict(user=rng.integers(0, 9, 150), item=rng.integers(0, 7, 150), rating=rng.uniform(1, 5, 150)))
def collab(bs): return collab_learner(CollabDataLoaders.from_df(ratings, bs=bs, seed=1, num_workers=0), n_factors=5, y_range=(0,5.5), opt_func=SGD, lr=.5, metrics=rmse)
same('collab dot', collab)
def collab_nn(bs): return collab_learner(CollabDataLoaders.from_df(ratings, bs=bs, seed=1, num_workers=0), use_nn=True, layers=[8], config=dict(use_bn=False), y_range=(0,5.5), opt_func=SGD, lr=.1)
same('collab nn', collab_nn)
''')

def test_torch_loaders():
    "Samplers, collate functions and generators of the user's own (cases 49, 67)"
    run('''
import torch.utils.data as D
set_seed(0)
x = torch.randn(90, 3); y = x.sum(1, keepdim=True) + 1
ds = D.TensorDataset(x, y)
order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
class Order(D.Sampler):
    def __len__(self): return len(order)
    def __iter__(self): return iter(order)
def collate(b): return torch.stack([o[0] for o in b])*2, torch.stack([o[1] for o in b])
def torch_dls(bs): return Learner(DataLoaders(D.DataLoader(ds, batch_size=bs, sampler=Order(), num_workers=0, collate_fn=collate), D.DataLoader(D.Subset(ds, range(64,90)), batch_size=bs, collate_fn=collate)),
                                  nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05, metrics=[mae, R2Score()])
same('torch', torch_dls)
class Rows(D.IterableDataset):
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __iter__(self): return (ds[i] for i in self.idxs)
class Sharded(Rows):
    def shard(self, num_shards, index): return Sharded(self.idxs[index::num_shards])
def sharded(bs): return Learner(DataLoaders(D.DataLoader(Sharded(order), batch_size=bs), D.DataLoader(ds, batch_size=bs)), nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05)
same('iterable with shard', sharded)

def shuffled0(bs): return Learner(DataLoaders(D.DataLoader(ds, batch_size=bs, shuffle=True), D.DataLoader(ds, batch_size=bs)), nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05)
same('torch shuffled by the global generator', shuffled0)
def shuffled(bs): return Learner(DataLoaders(D.DataLoader(ds, batch_size=bs, shuffle=True, generator=torch.Generator().manual_seed(3)), D.DataLoader(ds, batch_size=bs)), nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05)
same('torch shuffled, ragged', shuffled)

from fastai_xla_extensions.core import runtime_started
import multiprocessing
for bad,exc,msg in [(D.DataLoader(Rows(order), batch_size=4), TypeError, 'shard(num_shards, index)'),
                    (DataLoader(o for o in range(5)), ValueError, 'no length'), ([1,2], TypeError, 'list'), (DataLoader(Rows(order), bs=4, n=64), TypeError, 'no numbers'),
                    (DataLoader([(o,o) for o in range(31)], bs=8, drop_last=True), ValueError, '31 items: not one batch for 4 cores x bs 8 = 32 a step with drop_last=True')]:
    l = Learner(DataLoaders(bad, bad), nn.Linear(3,1), loss_func=MSELossFlat(), cbs=[])
    test_fail(lambda: l.xla_fit(1), exc=exc, contains=msg)
assert not runtime_started() and not multiprocessing.active_children()
''')

def test_text():
    "A language model carries its state along on each core; a classifier's batches have one length on all cores"
    run('''
from fastai.text.all import *
from pydoc_data.topics import topics
words = ' '.join(list(topics.values())[:6]).split()[:1400]
vocab = sorted(set(words)); ids = torch.tensor([vocab.index(w) for w in words])
texts = [ids[i:i+50] for i in range(0, 1400, 50)]
conf = dict(emb_sz=8, n_hid=12, n_layers=2, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=0.)
lm_conf = {**conf, 'tie_weights':True, 'out_bias':True}
from fastai.text.models.awdlstm import WeightDropout
def still(m):
    "No weight dropout (fastai's fails for a probability of 0)"
    for o in m.modules():
        if isinstance(o, WeightDropout): o.eval(); o.train = lambda mode=True: None
    return m
def lm(bs):
    dls = DataLoaders(LMDataLoader(texts[:20], bs=bs, seq_len=10, num_workers=0), LMDataLoader(texts[20:], bs=bs, seq_len=10, num_workers=0), device='cpu')
    m = still(get_language_model(AWD_LSTM, len(vocab), config=lm_conf))
    return Learner(dls, m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=1., metrics=[accuracy, Perplexity()], cbs=rnn_cbs(alpha=2, beta=1))
l,r = same('language model', lm, bs=2)
assert l.model[1].decoder.weight is l.model[0].encoder.weight

lens = np.random.default_rng(0).choice([4, 8, 16], 90)   # few lengths: each is a program to compile
docs = [(TensorText(ids[i*7:i*7+k]), TensorCategory(int(k>4))) for i,k in enumerate(lens)]
clas_conf = {**conf}
def clas(bs):
    kw = dict(before_batch=Pad_Chunk(seq_len=8, pad_first=True), num_workers=0, bs=bs)
    dls = DataLoaders(SortedDL(docs[:64], shuffle=True, drop_last=True, res=lens[:64].tolist(), **kw), SortedDL(docs[64:], res=lens[64:].tolist(), **kw), device='cpu')
    m = still(get_text_classifier(AWD_LSTM, len(vocab), 2, seq_len=8, config=clas_conf, max_len=100, lin_ftrs=[8], ps=[0.]))
    m[1].layers = nn.Sequential(*[nn.Sequential(*[q for q in o if not isinstance(q, nn.BatchNorm1d)]) for o in m[1].layers])   # see test_batchnorm
    return Learner(dls, m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=[accuracy, F1Score()], cbs=rnn_cbs())
same('classifier', clas, bs=2)
''')
