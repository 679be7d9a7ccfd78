"One process on all cores: equal to fastai on the CPU on every mesh, really split, without the host in the loop; modes, input and errors"
from textwrap import dedent
import pytest
from helpers import run_code

SETUP = '''
import gc, io, os, sys, warnings
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.all import *
from fastai.data.load import DataLoader
from fastai_xla_extensions.all import *
emulate_cores(8)

set_seed(0)
X = torch.randn(120, 6); Y = (X[:,0]*2 + X[:,1] + torch.randn(120)*.3 > 0).long()
def dls(bs=16, n_train=75, n_valid=37, x=X, y=Y, **kw):
    "5 steps, the last with 11 samples; and as uneven a validation set"
    ds = list(zip(x, y))
    return DataLoaders(DataLoader(ds[:n_train], bs=bs, shuffle=True, **kw), DataLoader(ds[n_train:n_train+n_valid], bs=bs), device='cpu')
def mlp(bn=False, n=64): return nn.Sequential(nn.Linear(6,n), *([nn.BatchNorm1d(n)] if bn else []), nn.ReLU(), nn.Linear(n,n), nn.ReLU(), nn.Linear(n,2))
momentum = partial(SGD, mom=.9)
def learner(model=mlp, opt=momentum, lr=.1, cbs=None, lf=None, metrics=accuracy, **kw):
    "Makes a learner, each time the same"
    return lambda: Learner(dls(**kw), model(), loss_func=lf or CrossEntropyLossFlat(), opt_func=opt, lr=lr, metrics=metrics, cbs=cbs() if cbs else None)
def make(mk):
    set_seed(7); l = mk()
    if hasattr(l, 'progress'): l.remove_cb(ProgressCallback)
    if hasattr(l.dls.train, 'rng'): l.dls.train.rng.seed(1)
    return l
def vec(l): return torch.cat([p.detach().flatten().double() for p in l.model.parameters()])
def near(a, b, tol=1e-5):
    a,b = np.array(a, float),np.array(b, float)
    return a.shape == b.shape and bool((abs(a-b) <= tol*np.maximum(1, abs(b))).all())

def same(name, mk, meshes=((4,2),), epochs=2, tol=1e-5, fit=None, loss_tol=1e-5, **kw):
    "On each mesh: the weights, running statistics, losses and metrics of fastai on the CPU. A mesh of names is one of all cores with these axes"
    fit = fit or (lambda l: l.fit(epochs))
    ref = make(mk); start = vec(ref)
    set_seed(3)
    with ref.no_logging(): fit(ref)
    assert (vec(ref)-start).norm() > 1e-3*start.norm() and torch.isfinite(vec(ref)).all(), f'{name} is not trained'
    bufs = dict(ref.model.named_buffers())
    for mesh in meshes:
        l,k = make(mk),dict(kw)
        ps,cbs = list(l.model.parameters()),[(type(o), id(o)) for o in l.cbs]
        if isinstance(mesh[0], str): mesh,k['axes'] = None,mesh
        assert (vec(l) == start).all() and l.to_spmd(mesh, **k) is l
        set_seed(3)
        with l.no_logging(): fit(l)
        assert l.detach_spmd() is l
        d = ((vec(l)-vec(ref)).norm()/vec(ref).norm()).item()
        print(f'{name} {mesh} {k}: weights {d:.1e}', l.recorder.values[-1], ref.recorder.values[-1], flush=True)
        assert d <= tol, (name, mesh, d)
        for o in ('values', 'losses', 'lrs', 'iters'): assert near(L(getattr(l.recorder, o)), L(getattr(ref.recorder, o)), loss_tol), (name, mesh, o, getattr(l.recorder, o), getattr(ref.recorder, o))
        for n,b in l.model.named_buffers(): assert near(b, bufs[n]), (name, mesh, n)
        # and an ordinary learner again
        assert all(p is q for p,q in zip(ps, l.model.parameters())) and cbs == [(type(o), id(o)) for o in l.cbs], (name, l.cbs)
        assert type(l) is type(ref) and l.dls.device == ref.dls.device and {t.device.type for t in [*l.model.parameters(), *l.model.buffers()]} == {'cpu'}
        for m,r in zip(l.model.modules(), ref.model.modules()): assert type(m) is type(r) and len(m._forward_hooks) == len(r._forward_hooks) and len(m._forward_pre_hooks) == len(r._forward_pre_hooks)
        assert vars(l).keys() == vars(ref).keys(), vars(l).keys() ^ vars(ref).keys()
    return l,ref
ALL = (8,1),(4,2),(2,4),(1,8)
'''

def run(code, timeout=240, **kw):
    __tracebackhide__ = True
    res = run_code(SETUP + dedent(code) + "\nprint('finished')\n", timeout=timeout, **kw)
    assert 'finished' in res
    return res

def test_equal_on_every_mesh():
    "Case 30, case 63 (c): one learner after the other in a process, each on another mesh; layers, optimizers and loaders that are easily compiled"
    run('''
    same('sgd', learner(), (*ALL, ('data','model')))
    same('adam', learner(opt=Adam, lr=.01), ALL, tol=1e-4)
    rules = {'2.weight': ('model','fsdp'), '2.bias': (('fsdp','model'),), '4.weight': (None,('model','fsdp'))}
    same('rules', learner(), ((2,2,2),), axes=('data','fsdp','model'), rules=rules)
    same('rules', learner(), ((4,2),), axes=('data','model'), rules={'2.weight': ('model',None), '2.bias': 'model', '4.weight': (None,'model')})
    same('axes for the batch alone', learner(), ((2,4),), axes=('rows','more_rows'))

    from fastai.tabular.all import *
    from fastai.collab import *
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(c=rng.choice(list('abcd'), 112), x=rng.normal(size=112), y=rng.normal(size=112)))
    df['t'] = np.where(df.x + (df.c=='a') > .3, 'yes', 'no')
    def tab():
        to = TabularPandas(df, [Categorify, FillMissing, Normalize], cat_names=['c'], cont_names=['x','y'], y_names="t", y_block=CategoryBlock(), splits=(list(range(75)), list(range(75,112))))
        return tabular_learner(to.dataloaders(bs=16, drop_last=False), layers=[64,32], n_out=2, metrics=[accuracy, F1Score(), RocAucBinary()], opt_func=momentum, lr=.1)
    same('tabular', tab, ((4,2),(1,8)))
    ratings = pd.DataFrame(dict(user=rng.integers(0, 40, 112), item=rng.integers(0, 30, 112), rating=rng.uniform(1, 5, 112)))
    def collab(**kw): return lambda: collab_learner(CollabDataLoaders.from_df(ratings, bs=16, seed=1, num_workers=0), y_range=(0,5.5), opt_func=SGD, lr=.1, metrics=rmse, **kw)
    same('collab dot', collab(n_factors=50), ((4,2),(1,8)))
    same('collab nn', collab(use_nn=True, layers=[64]), ((4,2),))

    for opt in (partial(OptimWrapper, opt=torch.optim.AdamW), ranger, Lamb, RMSProp): same(str(opt), learner(opt=opt, lr=.01), ((4,2),), tol=1e-4, epochs=3 if opt is ranger else 2)
    same('clipped', learner(cbs=lambda: GradientClip(.1)))
    same('accumulated', learner(cbs=lambda: GradientAccumulation(32)))
    same('MixUp', learner(cbs=MixUp, n_train=80))   # a short batch is filled up, and more is drawn for it
    def frozen(l): l.freeze_to(1); l.fit(1); l.frozen = l.model[0].weight.detach().cpu().clone(); l.unfreeze(); l.fit(1)
    l,r = same('frozen', lambda: Learner(dls(), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, splitter=lambda m: [params(m[0]), params(m[1:])], metrics=accuracy), fit=frozen)
    assert (l.frozen == r.frozen).all()

    class Tied(Module):
        def __init__(self): self.a,self.h,self.b = nn.Embedding(64, 32),nn.Linear(32,32),nn.Linear(32, 64); self.b.weight = self.a.weight
        def forward(self, x): return self.b(torch.tanh(self.h(self.a(x))).mean(1))
    words,nexts = torch.randint(0, 64, (120,5)),torch.randint(0, 64, (120,))
    l,_ = same('tied', learner(Tied, SGD, .5, x=words, y=nexts), ((4,2),(1,8)))
    assert l.model.a.weight is l.model.b.weight

    # activations computed again in the backward pass: of the first layer, of layers with running statistics, of all
    nested = lambda: nn.Sequential(mlp(True)[:3], *mlp()[2:])
    same('remat', learner(nested), remat='^0$')
    same('remat', learner(nested), ((1,8),), remat=(nn.Linear, nn.ReLU, nn.BatchNorm1d))
    ''')

def test_equal_deep():
    "Convolutions, attention, recurrent layers, segmentation"
    run('''
    from fastai.text.all import *
    images = torch.randn(120,3,6,6)
    def conv(): return nn.Sequential(nn.Conv2d(3,16,3,padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16,16,3,stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16,2))
    same('conv', learner(conv, x=images), ALL)

    class Transformer(Module):
        def __init__(self): self.emb,self.enc,self.head = nn.Embedding(20, 32),nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0., batch_first=True), 2),nn.Linear(32, 2)
        def forward(self, x): return self.head(self.enc(self.emb(x)).mean(1))
    same('transformer', learner(Transformer, Adam, .001, x=torch.randint(0, 20, (120,5))), tol=1e-4, epochs=1)
    same('transformer, remat', learner(Transformer, x=torch.randint(0, 20, (120,5)), n_train=80, n_valid=32), ((2,4),), epochs=1, remat=nn.TransformerEncoderLayer)

    class UNet(Module):
        def __init__(self): self.a,self.b,self.c,self.d = ConvLayer(3,8),ConvLayer(8,16,stride=2),PixelShuffle_ICNR(16,8),nn.Conv2d(16,2,1)
        def forward(self, x):
            a = self.a(x)
            return self.d(torch.cat([a, self.c(self.b(a))], 1))
    masks = [TensorMask((o[0]>0).long()) for o in images]
    same('segmentation', learner(UNet, Adam, .01, lf=CrossEntropyLossFlat(axis=1), metrics=[DiceMulti(), foreground_acc], x=[TensorImage(o) for o in images], y=masks), tol=1e-4, epochs=1)

    from pydoc_data.topics import topics
    from fastai.text.models.awdlstm import WeightDropout
    words = ' '.join(list(topics.values())[:6]).split()[:600]
    vocab = sorted(set(words)); ids = torch.tensor([vocab.index(w) for w in words])
    texts = [ids[i:i+50] for i in range(0, 600, 50)]
    conf = dict(emb_sz=8, n_hid=12, n_layers=2, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=0.)
    def still(m):
        "No weight dropout (fastai's fails for a probability of 0)"
        for o in m.modules():
            if isinstance(o, WeightDropout): o.eval(); o.train = lambda mode=True: None
        return m
    def lm():
        d = DataLoaders(LMDataLoader(texts[:8], bs=8, seq_len=10, num_workers=0), LMDataLoader(texts[8:], bs=8, seq_len=10, num_workers=0), device='cpu')
        m = still(get_language_model(AWD_LSTM, len(vocab), config={**conf, 'tie_weights':True, 'out_bias':True}))
        return Learner(d, m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=1., metrics=[accuracy, Perplexity()], cbs=rnn_cbs(alpha=2, beta=1))
    l,_ = same('language model', lm, epochs=1)
    assert l.model[1].decoder.weight is l.model[0].encoder.weight
    docs = [(TensorText(ids[i*7:i*7+8]), TensorCategory(i%2)) for i in range(60)]
    def clas():
        kw = dict(before_batch=Pad_Chunk(seq_len=8, pad_first=True), num_workers=0, bs=16)
        d = DataLoaders(SortedDL(docs[:43], shuffle=True, res=[8]*43, **kw), SortedDL(docs[43:], res=[8]*17, **kw), device='cpu')
        m = still(get_text_classifier(AWD_LSTM, len(vocab), 2, seq_len=8, config=conf, max_len=100, lin_ftrs=[8], ps=[0.]))
        return Learner(d, m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=[accuracy, F1Score()], cbs=rnn_cbs())
    same('text classifier', clas, epochs=1)
    ''')

def test_predictions():
    "All sizes, options and metrics; a story from the first look to a served model"
    run('''
    import contextlib, matplotlib
    matplotlib.use('Agg')
    from fastai.callback.tracker import *
    mk = learner(metrics=[accuracy, F1Score(), RocAucBinary()])
    l,ref = make(mk),make(mk)
    l.to_spmd((4,2))
    def alike(a, b, what):
        assert type(a) is type(b) and (b is None or len(a) == len(b)), (what, a, b)
        for p,q in zip(a, b) if b is not None else ():
            if isinstance(q, (tuple, L)) or q is None: alike(p, q, what); continue
            assert type(p) is type(q) and p.shape == q.shape and p.device.type == 'cpu' and p.dtype == q.dtype, (what, p, q)
            assert torch.allclose(p.float(), q.float(), rtol=1e-5, atol=1e-5), what
    def check(what, f):
        with l.no_bar(), l.no_logging(), ref.no_bar(), ref.no_logging(): alike(f(l), f(ref), what)
    every = dict(with_input=True, with_loss=True, with_decoded=True)
    check('validation set', lambda o: o.get_preds()); check('all of it', lambda o: o.get_preds(**every))
    check('training set', lambda o: o.get_preds(ds_idx=0, reorder=True, with_input=True)); check('as it comes', lambda o: o.get_preds(ds_idx=1, reorder=False)); check('raw', lambda o: o.get_preds(act=noop))
    for n in (1,7,9,37):
        items = list(zip(X[:n], Y[:n]))
        for kw in ({}, every): check(f'{n} samples {kw}', lambda o: o.get_preds(dl=DataLoader(items, bs=16), **kw))
        check(f'{n} unlabelled', lambda o: o.get_preds(dl=DataLoader([(x,) for x in X[:n]], bs=16, n_inp=1)))
        check(f'validate {n}', lambda o: (tensor(o.validate(dl=DataLoader(items, bs=16))),) if n > 7 else (tensor(o.validate(dl=DataLoader(items, bs=16))[:2]),))

    # a story
    from fastai.tabular.all import *
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(c=rng.choice(list('abcd'), 150), x=rng.normal(size=150), y=rng.normal(size=150)))
    df['t'] = np.where(df.x + (df.c=='a') > .3, 'yes', 'no')
    def story():
        to = TabularPandas(df, [Categorify, FillMissing, Normalize], cat_names=['c'], cont_names=['x','y'], y_names="t", y_block=CategoryBlock(), splits=(list(range(105)), list(range(105,142))))
        l = tabular_learner(to.dataloaders(bs=16, drop_last=False), layers=[64,32], n_out=2, metrics=[accuracy, F1Score()])
        l.splitter = lambda m: [params(m.embeds) + params(m.layers[0]), params(m.layers[1:])]
        return l
    res = []
    for spmd in (False, True):
        o = make(story); o.path = Path('spmd' if spmd else 'cpu'); o.path.mkdir()
        o.add_cb(ProgressCallback())
        if spmd: o.to_spmd((4,2))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            set_seed(5)
            r = dict(find=list(o.lr_find(num_it=40, suggest_funcs=(minimum, steep, valley, slide))), found=list(o.recorder.losses))
            o.fine_tune(2, 1e-2)
            r.update(values=list(o.recorder.values), preds=o.get_preds())
            o.fit_one_cycle(3, 1e-3, cbs=[SaveModelCallback(fname='best', monitor='accuracy'), EarlyStoppingCallback(patience=1, min_delta=10.), CSVLogger()])
        r.update(csv=(o.path/'history.csv').read_text(), early=len(o.recorder.values), bar=out.getvalue())
        w = [p.detach().cpu().clone() for p in o.model.parameters()]
        o.save('m'); o.fit(1)
        o.load('m')
        assert all((p.detach().cpu() == q).all() for p,q in zip(o.model.parameters(), w))
        o.fit(1)   # with the optimizer's state from the file
        r['after'] = list(o.recorder.values)
        assert {p.device.type for p in o.model.parameters()} == {'xla' if spmd else 'cpu'}
        row,cls,probs = o.predict(df.iloc[0])
        r.update(predicted=(str(row['t'].iloc[0]), int(cls)), probs=probs)
        with contextlib.redirect_stdout(io.StringIO()): o.show_results(max_n=3)
        o.export('e.pkl')
        if spmd:
            test_eq(type(o).__mro__[1].__name__, 'OnSPMD'); assert any(r.kind == 'parameter' and any(r.spec) for r in o.sharding_summary())
            sd = torch.load(o.path/'models'/'m.pth', map_location=None, weights_only=False)['model']
            test_eq(list(sd), list(make(story).model.state_dict())); assert {t.device.type for t in sd.values()} == {'cpu'}
        e = load_learner(o.path/'e.pkl')
        assert type(e) is type(make(story)) and {p.device.type for p in e.model.parameters()} == {'cpu'} and not [c for c in e.cbs if 'XLA' in type(c).__name__]
        r.update(served=e.predict(df.iloc[0])[2], dl=e.get_preds(dl=e.dls.test_dl(df.iloc[:9]))[0])
        res.append(r)
    c,s = res
    assert near(s['find'], c['find'], 1e-4) and near(s['found'], c['found'], 1e-4), (s['find'], c['find'])
    for k in 'values', 'after': assert near(s[k], c[k], 1e-4), (k, s[k], c[k])
    for k in 'probs', 'served', 'dl': assert near(s[k], c[k], 1e-3), (k, s[k], c[k])
    assert near(s['preds'][0], c['preds'][0], 1e-4) and (s['preds'][1] == c['preds'][1]).all()
    test_eq((s['early'], s['predicted']), (c['early'], c['predicted'])); assert s['early'] == 2
    numbers = lambda t: [[float(x) for x in row.split(',')[:-1]] for row in t.split()[1:]]
    assert near(numbers(s['csv']), numbers(c['csv']), 1e-4) and s['csv'].split()[0] == c['csv'].split()[0]
    print(repr(s['bar'][:1500])); print(repr(c['bar'][:1500]))
    plain = lambda t: [row.split()[:5] for row in t.replace(chr(13), chr(10)).split(chr(10)) if row.strip() and row.split()[0].isdigit() and len(row.split()) > 4]
    assert len(plain(s['bar'])) == len(plain(c['bar'])) >= 5
    for a,b in zip(plain(s['bar']), plain(c['bar'])): assert near([float(x) for x in a], [float(x) for x in b], 1e-3), (a, b)
    ''')
