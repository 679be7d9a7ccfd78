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

def run(*codes, timeout=240, **kw):
    __tracebackhide__ = True
    res = run_code(SETUP + '\n'.join(map(dedent, codes)) + "\nprint('finished')\n", timeout=timeout, **kw)
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
        def __init__(self, n=2): self.emb,self.enc,self.head = nn.Embedding(20, 32),nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0., batch_first=True), n),nn.Linear(32, 2)
        def forward(self, x): return self.head(self.enc(self.emb(x)).mean(1))
    same('transformer', learner(Transformer, Adam, .001, x=torch.randint(0, 20, (120,5)), n_valid=13), tol=1e-4, epochs=1)
    same('transformer, remat', learner(partial(Transformer, 1), x=torch.randint(0, 20, (120,5)), n_valid=16), ((2,4),), epochs=1, remat=nn.TransformerEncoderLayer)

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
    conf = dict(emb_sz=8, n_hid=12, n_layers=1, pad_token=1, bidir=False, output_p=0., hidden_p=0., input_p=0., embed_p=0., weight_p=0.)
    def still(m):
        "No weight dropout (fastai's fails for a probability of 0)"
        for o in m.modules():
            if isinstance(o, WeightDropout): o.eval(); o.train = lambda mode=True: None
        return m
    def lm():
        d = DataLoaders(LMDataLoader(texts[:8], bs=8, seq_len=5, num_workers=0), LMDataLoader(texts[8:], bs=8, seq_len=5, num_workers=0), device='cpu')
        m = still(get_language_model(AWD_LSTM, len(vocab), config={**conf, 'tie_weights':True, 'out_bias':True}))
        return Learner(d, m, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=1., metrics=[accuracy, Perplexity()], cbs=rnn_cbs(alpha=2, beta=1))
    l,_ = same('language model', lm, epochs=1)
    assert l.model[1].decoder.weight is l.model[0].encoder.weight
    docs = [(TensorText(ids[i*7:i*7+4]), TensorCategory(i%2)) for i in range(56)]
    def clas():
        kw = dict(before_batch=Pad_Chunk(seq_len=4, pad_first=True), num_workers=0, bs=16)
        d = DataLoaders(SortedDL(docs[:43], shuffle=True, res=[4]*43, **kw), SortedDL(docs[43:], res=[4]*13, **kw), device='cpu')
        m = still(get_text_classifier(AWD_LSTM, len(vocab), 2, seq_len=4, config=conf, max_len=100, lin_ftrs=[8], ps=[0.]))
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

def test_sharding():
    "Case 30: read from the shards, parameters, gradients and optimizer state are split alike from the first step on; marks and wrappers of the user's own"
    run('''
    def spec(t):
        import torch_xla
        return torch_xla._XLAC._get_xla_sharding_spec(t)
    class Steps(Callback):
        "In a step: how its gradients are split. After it: how the optimizer's state is"
        order = 7
        def before_fit(self): self.grads,self.states = {},{}
        def before_step(self):
            if self.grads: return
            from fastai_xla_extensions.core import sync
            sync()
            self.grads = {r.name: (r.shard, r.spec) for r in self.learn.sharding_summary().of('gradient')}
        def after_step(self):
            if self.states: return
            s = self.learn.sharding_summary()
            for r in s:
                if r.kind not in ('parameter', 'gradient', 'buffer'): self.states.setdefault(r.name, {})[r.kind] = r.shard,r.spec
    big = lambda: nn.Sequential(nn.Linear(64,256), nn.ReLU(), nn.Linear(256,10))   # as in case 30
    x,y = torch.randn(80,64),torch.randint(0,10,(80,))
    def run(mesh, opt, **kw):
        l = make(learner(big, opt, .01, x=x, y=y, n_train=48, n_valid=32))
        l.to_spmd(mesh, **kw); l.add_cb(cb := Steps())
        with l.no_logging(): l.fit(1)
        ps = {r.name: (r.shard, r.spec) for r in l.sharding_summary().of('parameter')}
        assert cb.grads == ps, (cb.grads, ps)
        return l,cb,ps
    adam = {'grad_avg','sqr_avg'}
    for mesh,shard in (((1,8),(32,64)), ((4,2),(128,64)), ((8,1),(256,64))):
        l,cb,ps = run(mesh, Adam)
        test_eq(ps['0.weight'][0], shard); test_eq(ps['2.bias'], ((10,), (None,)))
        if mesh == (1,8):
            test_eq(ps['2.weight'], ((10,32), (None,'fsdp')))
            assert spec(l.model[0].weight).startswith('{devices=[8,1]'), spec(l.model[0].weight)
        for n,s in cb.states.items(): test_eq(s, {k: ps[n] for k in adam}); assert n in ps
        test_eq(set(cb.states), set(ps))
        p = l.model[0].weight   # the state is read from the shards again, without the summary
        for k in adam: test_eq(spec(l.opt.state[p][k]), spec(p))
        l.detach_spmd()
    for opt,names in ((partial(OptimWrapper, opt=torch.optim.AdamW), {'exp_avg','exp_avg_sq'}), (partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9), {'momentum_buffer'})):
        l,cb,ps = run((4,2), opt)
        for n,s in cb.states.items(): test_eq(s, {k: ps[n] for k in names})
        test_eq(set(cb.states), set(ps)); l.detach_spmd()
    l,cb,ps = run((4,2), Adam, axes=('data','model'), rules={'0.weight': ('model',None)})
    test_eq(ps['0.weight'], ((128,64), ('model',None))); test_eq(cb.states['0.weight']['sqr_avg'], ps['0.weight'])
    l.detach_spmd()

    # 10 million parameters
    wide = lambda: nn.Sequential(nn.Linear(6,1024), nn.ReLU(), *[o for _ in range(9) for o in (nn.Linear(1024,1024), nn.ReLU())], nn.Linear(1024,512), nn.Linear(512, 2))
    for mesh,most in (((4,2), .52), ((1,8), .14)):
        l = make(learner(wide, Adam, 1e-3, n_train=16, n_valid=0)).to_spmd(mesh)
        with l.no_logging(): l.fit(1)
        s = l.sharding_summary()
        kinds = ['parameter','grad_avg','sqr_avg']
        test_eq(s.kinds, kinds); assert s.total('parameter')/4 > 9.9e6
        for k in kinds: assert s.per_core(k) <= most*s.total(k), (mesh, k, s.per_core(k)/s.total(k))
        print(mesh, s.per_core()/s.total(), repr(s).splitlines()[0], repr(s).splitlines()[-4:])
        n = sum(p.numel() for p in l.model.parameters()); test_eq(s.total(), 3*4*n)
        l.detach_spmd(); del l; gc.collect()

    # marks made by hand stay
    import torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
    assert xr.is_spmd()
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDP
    mesh = xs.Mesh(np.arange(8), (4,2), ('replica','fsdp'))
    ref = make(learner())
    with ref.no_logging(): ref.fit(2)
    def equal(l, what):
        d = ((vec(l).cpu()-vec(ref)).norm()/vec(ref).norm()).item()
        assert d <= 1e-5 and near(l.recorder.values, ref.recorder.values), (what, d, l.recorder.values, ref.recorder.values)
    def marked():
        m = mlp().to('xla')
        xs.mark_sharding(m[0].weight, mesh, ('fsdp',None)); xs.mark_sharding(m[2].weight, mesh, (None,'fsdp')); xs.mark_sharding(m[4].weight, mesh, (None,('fsdp','replica')))
        return Learner(dls(), m, loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy)
    l = make(marked); old = [spec(p) for p in l.model.parameters()]
    l.to_spmd(mesh)
    with l.no_logging(): l.fit(2)
    test_eq([spec(p) for p in l.model.parameters()][::2], old[::2])
    s = {r.name: r.spec for r in l.sharding_summary() if r.kind == 'parameter'}
    test_eq((s['0.weight'], s['2.weight'], s['4.weight']), (('fsdp',None), (None,'fsdp'), (None,('fsdp','replica'))))
    l.detach_spmd(); equal(l, 'marked')

    # torch_xla's own wrapper
    def wrapped(): return Learner(dls(), FSDP(mlp().to('xla'), mesh=mesh), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy)
    l = make(wrapped).to_spmd(mesh)
    with l.no_logging(): l.fit(2)
    assert any(any(r.spec) for r in l.sharding_summary() if r.kind == 'parameter')
    file = l.save('wrapped')
    keys = list(torch.load(file, map_location=None, weights_only=False)['model'])
    test_eq(keys, list(mlp().state_dict()))
    w = vec(l).cpu()
    equal(l, 'wrapped')
    with l.no_logging(): l.fit(1); l.load('wrapped')
    assert (vec(l).cpu() == w).all()
    r = make(learner()); r.path = l.path; r.load('wrapped'); assert near(vec(r), w)   # and into the plain model
    l.detach_spmd()
    def nested():
        m = mlp().to('xla')
        for i in (0,2): m[i] = FSDP(m[i], mesh=mesh)
        return Learner(dls(), FSDP(m, mesh=mesh), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy)
    l = make(nested).to_spmd(mesh)
    test_eq(list(l.model.state_dict()), keys)
    l.path = r.path; l.load('wrapped'); assert (vec(l).cpu() == w).all()
    l.detach_spmd()
    assert all('_orig_module' in k for k in l.model.state_dict())   # the wrapper's own way again
    ''')

def test_inputs():
    "Case 31, case 62: tensors of any rank are split over their first dimension; dicts, tensors without dimensions, tuples as outputs; odd parameters; bfloat16"
    run('''
    from fastai.data.load import DataLoader
    class Specs(Callback):
        "How each tensor of the training batches is split"
        order = 0
        def before_fit(self): self.specs = set()
        def before_batch(self):
            if not hasattr(self.learn, 'xla_mesh'): return
            import torch_xla
            from fastai.torch_core import apply
            from fastai_xla_extensions.core import plain
            apply(lambda t: self.specs.add((t.ndim, torch_xla._XLAC._get_xla_sharding_spec(plain(t)))), (self.learn.xb, self.learn.yb))
    def check(name, ranks, mk, mesh=(4,2), n=8, **kw):
        cbs = []
        def new():
            l = mk(); cbs.append(Specs()); return l.add_cb(cbs[-1])
        same(name, new, (mesh,), **kw)
        specs = cbs[-1].specs
        test_eq(sorted({r for r,_ in specs}), sorted(set(ranks)))
        for r,s in specs:
            if r == 0: assert s in ('', '{replicated}'), (name, s)
            else: assert s.startswith('{devices=[' + ','.join([str(n)] + ['1']*(r-1))), (name, r, s)
    flat = lambda: nn.Sequential(Flatten(), nn.Linear(3*4*4, 2))
    images = torch.randn(120,3,4,4)
    check('image, label', (4,1), learner(flat, x=images))
    check('with a model axis', (4,1), learner(flat, x=images), mesh=('data','model'))   # (8,1)
    check('split 2 x 4', (4,1), learner(flat, x=images), mesh=(2,4), n=2, axes=('data','model'), epochs=1)
    class Pixels(Module):
        def __init__(self): self.l = nn.Linear(3, 2)
        def forward(self, x): return self.l(x.permute(0,2,3,1)).permute(0,3,1,2)
    check('image, mask', (4,3), learner(Pixels, lf=CrossEntropyLossFlat(axis=1), metrics=foreground_acc, x=[TensorImage(o) for o in images], y=[TensorMask((o[0]>0).long()) for o in images]))
    def loaders(create, n_inp):
        ds = list(zip(X, Y, X.sum(1)))
        def create_batch(b):
            x,y,z = (torch.stack([o[i] for o in b]) for i in range(3))
            return create(x, y, z)
        d = DataLoaders(*[DataLoader(o, bs=16, create_batch=create_batch, shuffle=o is ds[:75]) for o in (ds[:75], ds[75:112])], device='cpu')
        for o in d.loaders: o.n_inp = n_inp
        return d
    class Two(Module):
        def __init__(self): self.a,self.b = nn.Linear(6, 2),nn.Linear(6, 1)
        def forward(self, x, z): return self.a(x), self.b(x) + z[:,None]
    def two_losses(p, y, z): return F.cross_entropy(p[0], y) + F.mse_loss(p[1].squeeze(1), z)
    check('two inputs, two targets', (2,1), lambda: Learner(loaders(lambda x,y,z: (x, z, y, z), 2), Two(), loss_func=two_losses, opt_func=momentum, lr=.01))
    class Scaled(Module):
        def __init__(self): self.l = nn.Linear(6, 2)
        def forward(self, x, s): return self.l(x)*s
    check('no dimensions', (2,1,0), lambda: Learner(loaders(lambda x,y,z: (x, torch.tensor(.5), y), 2), Scaled(), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy))
    class Dict(Module):
        def __init__(self): self.l = nn.Linear(6, 2)
        def forward(self, d): return self.l(d['x']) + d['z'][:,None]
    check('dict', (2,1), lambda: Learner(loaders(lambda x,y,z: (dict(x=x, z=z), y), 1), Dict(), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy))

    class Odd(Module):
        "A parameter without dimensions, one that nothing divides, a layer that gives a tuple and one that gives a dict"
        def __init__(self): self.body,self.scale,self.odd,self.out,self.head = nn.Linear(6,64),nn.Parameter(torch.tensor(1.5)),nn.Parameter(torch.ones(5)),Pair(),nn.Linear(69,2)
        def forward(self, x):
            d = self.out(self.body(x))
            return self.head(torch.cat([torch.relu(d['a'])*self.scale, self.odd.expand(len(x), 5)*d['b']], 1))
    class Pair(Module):
        def __init__(self): self.t = Halves()
        def forward(self, x): a,b = self.t(x); return dict(a=a, b=b)
    class Halves(Module):
        def __init__(self): self.w = nn.Parameter(torch.randn(64,64)/8)
        def forward(self, x): return x @ self.w, x[:,:1]
    odd = lambda: Learner(dls(), Odd(), loss_func=CrossEntropyLossFlat(), opt_func=momentum, lr=.1, metrics=accuracy, splitter=lambda m: [params(m.body), [m.scale, m.odd, *params(m.out), *params(m.head)]])
    def tune(l):
        kinds = [type(m) for m in l.model.modules()]
        l.freeze(); w = vec(l.model.body if hasattr(l.model.body, 'model') else Wrap(l.model.body)).cpu(); l.fit(1)
        assert (vec(Wrap(l.model.body)).cpu() == w).all() and kinds == [type(m) for m in l.model.modules()] and len(l.opt.param_lists) == 2
        l.unfreeze(); l.fit(1)
    class Wrap:
        def __init__(self, m): self.model = m
    same('odd parameters', odd, ((4,2),(1,8)), fit=tune)

    # bfloat16: close to float32, and what is kept is float32
    mk = learner(lambda: mlp(True), lr=.05)
    ref,l = make(mk),make(mk)
    with ref.no_logging(): ref.fit(3)
    l.to_spmd((4,2)); l.to_xla_bf16()
    class Types(Callback):
        def before_fit(self): self.h = self.learn.model[0].register_forward_hook(lambda m,i,o: self.types.add(o.dtype)); self.types = set()
        def after_fit(self): self.h.remove()
    with l.no_logging(): l.fit(3, cbs=(t := Types()))
    test_eq(t.types, {torch.bfloat16})
    assert {p.dtype for p in l.model.parameters()} == {s.dtype for p in l.model.parameters() for s in l.opt.state[p].values() if isinstance(s, Tensor)} == {torch.float32}
    assert near(L(l.recorder.values).itemgot(0), L(ref.recorder.values).itemgot(0), .02) and near(L(l.recorder.values).itemgot(1), L(ref.recorder.values).itemgot(1), .02), (l.recorder.values, ref.recorder.values)
    assert not near(l.recorder.values, ref.recorder.values)
    ''')

COUNTS = '''
import torch_xla, torch_xla.core.xla_model as xm, torch_xla.debug.metrics as met
def counts():
    xm.wait_device_ops()
    n = lambda k: (met.metric_data(k) or [0])[0]
    return np.array([met.counter_value('ExecuteReplicated') or 0, n('TransferFromDeviceTime'), n('TransferToDeviceTime'), n('CompileTime'), sum(met.counter_value(k) for k in met.counter_names() if k.startswith('aten::'))])
class Count(Callback):
    order = 2000
    def before_fit(self): self.rows = []
    def after_batch(self):
        if self.training: self.rows.append(counts())
'''

def test_counts():
    "A steady training batch is one execution: nothing comes from the device, three uploads at most, nothing compiles over a whole schedule"
    run(COUNTS, '''
    import contextlib
    x = torch.randn(16*90 + 32, 6); y = (x[:,0] > 0).long()
    for bar in (False, True):
        l = make(learner(lambda: mlp(True), Adam, x=x, y=y, n_train=16*90, n_valid=32))
        if bar: l.add_cb(ProgressCallback())
        l.to_spmd((4,2))
        c = Count(); t0 = time.monotonic()
        with l.no_logging() if not bar else contextlib.redirect_stdout(io.StringIO()): l.fit_one_cycle(5, 1e-2, cbs=c)
        took = time.monotonic() - t0
        rows = np.stack(c.rows); test_eq(len(rows), 450)
        steps = np.diff(rows, axis=0)
        inside = steps[[i for i in range(449) if (i+1) % 90 and i]]   # not those that a validation lies between, nor the first
        print('bar' if bar else 'no bar', 'mean', inside.mean(0), 'max', inside.max(0), 'compiled', rows[-1,3] - rows[0,3])
        usual = np.median(inside, axis=0); test_eq(list(usual[[0,1,3,4]]), [1,0,0,0]); assert usual[2] <= 3, usual
        reads = inside[:,1].sum(); blocks = 450/60
        assert reads <= (2*took + 10 if bar else 0) + blocks, (reads, took)
        test_eq(inside[:,0].max(), 1)
        test_eq(list(inside[:,3:].sum(0)), [0,0])
        first = rows[:90,3]; assert first[-1] == first[1], first[:5]          # from the second batch on
        assert rows[-1,3] == rows[90,3], rows[::90,3]                         # and after the first validation, nothing at all
        l.detach_spmd()
    ''')

PLAIN = '''
def unchanged(l, before): assert {k: type(v) for k,v in vars(l).items()} == before and {p.device.type for p in l.model.parameters()} == {'cpu'} and 'OnSPMD' not in [c.__name__ for c in type(l).__mro__]
def refused(f, *texts, exc=RuntimeError):
    try: f()
    except exc as e: assert all(t in str(e) for t in texts), (texts, e)
    else: assert False, ('not refused', texts)
verbs = dict(xla_fit=(1,), xla_fit_one_cycle=(1,), xla_fine_tune=(1,), xla_fit_flat_cos=(1,), xla_fit_sgdr=(1,1), xla_lr_find=(), xla_get_preds=(), xla_validate=(), xla_tta=(), to_xla=())
verbs = {k: v for k,v in verbs.items() if hasattr(Learner, k)}
assert {'xla_fit', 'xla_lr_find', 'xla_get_preds', 'xla_validate', 'to_xla'} <= set(verbs)
import multiprocessing
def none_of_them(l):
    for k,args in verbs.items(): refused(lambda: getattr(l, k)(*args), k, 'SPMD', 'to_spmd', 'one process per core' if k != 'to_xla' else 'one core')
    assert not multiprocessing.active_children()
'''

LATE = dict(device='torch_xla.device()', seed='xm.set_rng_state(42)', tensor="t = torch.ones(2, device='xla')", to_xla='o = make(learner()); o.to_xla()')

def test_modes():
    "Case 32, case 63: too late is an error that names the order, never a crash; the modes aren't mixed; the environment's switch counts"
    for name,code in LATE.items():
        run(PLAIN, f'''
        import torch_xla, torch_xla.core.xla_model as xm
        l = make(learner()); before = {{k: type(v) for k,v in vars(l).items()}}
        {code}
        for _ in range(2): refused(l.to_spmd, 'learn.to_spmd', 'before', 'estart')
        unchanged(l, before)
        with l.no_logging(): l.fit(1)
        ''', '''
        refused(o.to_spmd, 'learn.to_spmd', 'before')   # and that learner, too, is as it was
        with o.no_logging(): o.fit(1)
        o.detach_xla()
        assert near(vec(o), vec(l)), 'on one core'
        ''' if name == 'to_xla' else '')
    run(PLAIN, '''
    import torch_xla.runtime as xr
    set_seed(42, True)   # case 63 (b)
    ref = make(learner()); start = vec(ref)
    with ref.no_logging(): ref.fit(2)
    a = make(learner())
    with a.no_logging(): a.fit(1)   # on the CPU first, then on all cores
    a.to_spmd((4,2))
    class Steps(Callback):
        def before_fit(self): self.n = 0
        def after_batch(self): self.n += self.training
    s = Steps()
    a.dls.train.rng.setstate(a.dls.train.rng.getstate())
    with a.no_logging(): a.fit(1, cbs=s)
    test_eq((s.n, xr.process_count(), xr.world_size(), xr.global_runtime_device_count()), (5,1,1,8))   # case 32: steps are those of `bs`
    none_of_them(a)
    p0 = a.model[0].weight
    a.to_spmd((1,8))   # another mesh, without leaving the first
    test_eq([r.shard for r in a.sharding_summary() if r.name == '2.weight' and r.kind == 'parameter'], [(8,64)])
    assert a.model[0].weight is p0
    for bad in (dict(mesh=(4,4)), dict(rules={'nothing': (None,)}), dict(remat='nothing')):   # and a bad one changes nothing
        refused(lambda: a.to_spmd(**bad), exc=ValueError)
        test_eq([r.shard for r in a.sharding_summary() if r.name == '2.weight' and r.kind == 'parameter'], [(8,64)])
    with a.no_logging(): a.fit(1)
    a.detach_spmd(); none_of_them(a)
    refused(a.sharding_summary, 'to_spmd')
    with a.no_logging(): a.fit(1)    # on the CPU again, momentum carried through all
    b = make(learner())
    with b.no_logging():
        for _ in range(4): b.fit(1)
    assert near(vec(a), vec(b)) and near(a.recorder.values, b.recorder.values)
    b = make(learner()); none_of_them(b)   # a learner that never was in SPMD mode
    b.to_spmd((2,4)); c = b.to_spmd()
    test_eq({r.spec for r in c.sharding_summary() if r.kind == 'parameter'}, {(None,), (None,None)})
    ''')
    run(PLAIN, '''
    l = make(learner()); none_of_them(l)   # XLA_USE_SPMD=1 in the environment
    same('switched on by the environment', learner())
    none_of_them(l)
    ''', env=dict(XLA_USE_SPMD=1))

def test_bad_input():
    "Meshes, axes, rules and names that don't fit: an error that says so, before the device is touched; the learner is as before"
    run(PLAIN, '''
    from fastai_xla_extensions.core import runtime_started
    l = make(learner()); before = {k: type(v) for k,v in vars(l).items()}
    for text,kw in [('16 cores', dict(mesh=(4,4))), ('(4, 2)', dict(mesh=(4,3))), ('4 cores', dict(mesh=4, axes='data')), ('whole', dict(mesh=(-8,-1))), ('2 dimensions', dict(mesh=(4,2), axes=('a','b','c'))), ('once', dict(mesh=(4,2), axes=('a','a'))),
                    ("for the batch", dict(mesh=(4,2), axes=('model','tensor'))), ("'column'", dict(mesh=(4,2), rules={'0.weight': ('column',None)})), ('replica', dict(mesh=(4,2), rules={'0.weight': ('model',None)})),
                    ('2 can', dict(mesh=(2,4), rules={'4.weight': ('fsdp',None)})), ('into 8 parts', dict(mesh=(2,4), rules={'0.weight': (None,('replica','fsdp'))})), ('2 dimensions', dict(mesh=(4,2), rules={'0.weight': ('fsdp',)})),
                    ('twice', dict(mesh=(4,2), rules={'2.weight': ('fsdp','fsdp')})), ('head', dict(mesh=(4,2), rules={'head': (None,)})), ('0.weight', dict(mesh=(4,2), rules={'head': (None,)})),
                    ('decoder', dict(mesh=(4,2), remat='decoder')), ('Conv2d', dict(mesh=(4,2), remat=nn.Conv2d))]:
        refused(lambda: l.to_spmd(**kw), text, exc=ValueError)
    unchanged(l, before); assert not runtime_started()
    import torch_xla.runtime as xr; assert not xr.is_spmd() and 'XLA_USE_SPMD' not in os.environ
    l.to_spmd((4,2))   # and it isn't too late
    with l.no_logging(): l.fit(1)
    l.detach_spmd(); unchanged(l, {k: type(v) for k,v in vars(l).items()})
    ''')
