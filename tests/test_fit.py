"Training on several cores equals training on one, and fastai's own on the CPU; and all that goes with a fit"
import json
from textwrap import dedent
import pytest
from helpers import run_code

START = '''
import contextlib, gc, hashlib, io, os, signal, subprocess, sys, tempfile, threading, time
import multiprocessing as mp
from sklearn.datasets import load_digits
from fastai.basics import *
from fastai.callback.hook import *
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientClip
from fastai_xla_extensions.all import *
from fastai_xla_extensions.core import ordinal, runtime_started, sync, world_size

digits = load_digits()
X,Y = torch.tensor(digits.data/16, dtype=torch.float32),torch.tensor(digits.target)
items = list(zip(X, Y))

def mlp(): return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def loaders(bs, n=320, drop_last=False, n_valid=157):
    "Real digits, shuffled; those to validate divide neither by the batch size nor by the cores"
    return DataLoaders.from_dsets(items[:n], items[1000:1000+n_valid], bs=bs, shuffle=(True, False), drop_last=(drop_last, False), device='cpu', num_workers=0)

sgd = partial(SGD, mom=.9)

def learner(bs, model=mlp, opt_func=sgd, lr=.1, n=320, drop_last=False, loss_func=None, metrics=accuracy, dls=None, **kwargs):
    set_seed(1)
    dls = dls or loaders(bs, n, drop_last)
    dls.train.rng.seed(7)
    learn = Learner(dls, model(), loss_func=loss_func or CrossEntropyLossFlat(), opt_func=opt_func, lr=lr, metrics=metrics, **kwargs)
    learn.remove_cb(ProgressCallback)
    return learn

def vec(o): return torch.cat([p.detach().flatten().double() for p in getattr(o, 'model', o).parameters()])
def diff(a, b): return ((vec(a)-vec(b)).norm()/vec(b).norm()).item()
def same(a, b, tol=1e-5, what=''):
    "Weights, history and what the recorder saw"
    d = diff(a, b)
    assert d <= tol, f'{what}: weights differ by {d}'
    ra,rb = a.recorder,b.recorder
    assert ra.metric_names == rb.metric_names and len(ra.losses) == len(rb.losses) and len(ra.values) == len(rb.values), f'{what}: {ra.values} {rb.values}'
    for k in 'values', 'losses', 'lrs':
        x,y = ([[float(o) for o in L(v)] for v in getattr(r, k)] for r in (ra, rb))
        assert list(map(len, x)) == list(map(len, y)) and np.allclose(sum(x, []), sum(y, []), rtol=tol, atol=tol), f'{what}: {k} {x} {y}'
    assert ra.iters == rb.iters and np.allclose(np.array(a.final_record, float), np.array(b.final_record, float), rtol=tol, atol=tol), f'{what}: {a.final_record}'

def fingerprint(model): return hashlib.sha1(b''.join(o.detach().cpu().numpy().tobytes() for o in model.state_dict().values())).hexdigest()

class Hashes(Callback):
    "A file per core and epoch with a hash of all weights"
    def __init__(self, folder): self.folder = Path(folder); self.folder.mkdir()
    def after_epoch(self): (self.folder/f'{ordinal()}-{self.epoch}').write_text(fingerprint(self.learn.model))
    def check(self, cores, epochs):
        files = {o.name: o.read_text() for o in self.folder.iterdir()}
        assert len(files) == cores*epochs, sorted(files)
        for i in range(epochs): assert len({files[f'{c}-{i}'] for c in range(cores)}) == 1, f'{self.folder}, epoch {i}: {files}'

def untouched(): assert not runtime_started() and not mp.active_children()
'''

def run(code, **kwargs):
    __tracebackhide__ = True
    res = run_code(START + dedent(code) + "print('finished')", **kwargs)
    assert res.rstrip().endswith('finished')
    return res

ALL = 1,2,4,8
CASES = dict(   # two epochs each: keywords of the learner, clipping, cores
    sgd   = ('sgd, 1e-5', [(dict(n=310, drop_last=True), None, ALL),
                           (dict(n=299), None, (2,8)),    # 43 items in the last step: the cores have 22 or 21, 6 or 5
                           (dict(n=259), None, (8,)),     # 3 items: some cores have none
                           (dict(n=299), .1, (4,8))]),
    adam  = ('Adam, 1e-4', [(dict(n=299, lr=.01), .1, ALL)]),
    adamw = ('partial(OptimWrapper, opt=torch.optim.AdamW), 1e-4', [(dict(n=299, lr=.01), .1, ALL)]))

@pytest.mark.parametrize('opt', CASES)
def test_equal(opt):
    "The same weights, losses and metrics on 1, 2, 4 and 8 cores, on one XLA device and in plain fastai"
    opt,cases = CASES[opt]
    run(f'''
    emulate_cores(8)
    opt_func,tol = {opt}
    cases = {cases}
    def make(bs, kwargs, clip): return learner(bs, opt_func=opt_func, cbs=GradientClip(clip) if clip else None, **kwargs)
    refs = []
    for kwargs,clip,cores in cases:
        ref = make(64, kwargs, clip)
        start = vec(ref)
        with ref.no_logging(): ref.fit(2)
        assert (vec(ref)-start).norm() > .02*start.norm() and len(ref.recorder.values) == 2
        if clip and refs: assert diff(ref, refs[-1]) > .01   # it is clipped
        refs.append(ref)
        for n in cores:
            learn,what = make(64//n, kwargs, clip),f'{{n}} cores {{kwargs}} {{clip}}'
            hashes = Hashes(what)
            ps = list(learn.model.parameters())
            with learn.no_logging(): learn.xla_fit(2, cbs=hashes, num_cores=n)
            same(learn, ref, tol, what)
            hashes.check(n, 2)
            assert all(a is b for a,b in zip(ps, learn.model.parameters())) and {{p.device.type for p in ps}} == {{'cpu'}}
    untouched()
    for (kwargs,clip,_),ref in zip(cases, refs):
        learn = make(64, kwargs, clip)
        assert learn.to_xla() is learn
        with learn.no_logging(): learn.fit(2)
        assert {{p.device.type for p in learn.model.parameters()}} == {{'xla'}}
        learn.detach_xla()
        same(learn, ref, tol, f'to_xla {{kwargs}} {{clip}}')
    try: learn.xla_fit(1)
    except RuntimeError as e: assert 'learn.xla_fit' in str(e) and 'taken by learn.to_xla()' in str(e), e
    else: assert False, 'this process holds the device'
    ''')

def test_call_after_call():
    "Call after call equals fastai's own, whatever is looked at in between; the runtime never starts here (cases 03, 06, 71)"
    run('''
    emulate_cores(4)
    # first of all a fit on the CPU, as in every notebook: autograd's threads, once started, don't work with XLA
    learn,ref = learner(16, n=300),learner(64, n=300)
    with learn.no_logging(): learner(16).fit(1)
    threading_was = torch.autograd.is_multithreading_enabled()
    def both(verb, *args, **kwargs):
        with learn.no_logging(), ref.no_logging():
            getattr(learn, 'xla_'+verb)(*args, **kwargs)
            getattr(ref, verb)(*args, **kwargs)
        same(learn, ref, what=verb)
        for a,b in zip(learn.opt.all_params(), ref.opt.all_params()):
            assert a[0] is not b[0] and np.allclose(a[2]['grad_avg'], b[2]['grad_avg'], rtol=1e-4, atol=1e-6)
            assert a[3] == b[3], (a[3], b[3])
        assert learn.dls.train.rng.getstate() == ref.dls.train.rng.getstate()
        assert torch.autograd.is_multithreading_enabled() == threading_was
        untouched()
    def look():
        assert n_cores() == 4
        learn.dls.one_batch(); learn.summary()
        for o in (learn, learn.dls, learn.dls.train, learn.model, learn.opt, learn.recorder, *learn.cbs, XLAOptCallback(), TPUDistributedDL(learn.dls.train, 1, 4)): repr(o)
        untouched()
    def restart():
        "Looking draws random numbers; the order of samples must be the same for both"
        for o in (learn, ref): o.dls.train.rng.seed(11)
    both('fit', 1)
    both('fit', 1)
    look(); restart()
    both('fit_one_cycle', 1, 1e-1)
    assert learn.recorder.hps.keys() == ref.recorder.hps.keys()
    for k,v in ref.recorder.hps.items(): assert np.allclose(learn.recorder.hps[k], v), k
    look(); restart()
    both('fit', 2, .05, wd=.1)
    both('fit', 1, reset_opt=True)
    both('fit', 3, start_epoch=2)
    assert np.allclose(learn.validate(), ref.final_record[1:], atol=1e-5)

    # the CPU, all cores, the CPU
    def on_cpu():
        ref.dls.train.bs = 16
        for o in (learn, ref):
            with o.no_logging(): o.fit(1)
        ref.dls.train.bs = 64
        same(learn, ref, what='on the CPU')
    on_cpu()
    both('fit', 1)
    on_cpu()
    ''')

def test_one_device():
    "`to_xla` at any time: after a fit on the CPU, with an optimizer made before, frozen, there and back (case 71)"
    run('''
    def fit(o, *args):
        with o.no_logging(): o.fit(*args)
    fit(learner(64), 1)   # autograd's threads, once started on the CPU, don't work with XLA
    ref = learner(64)
    threading_was = torch.autograd.is_multithreading_enabled()
    early,there_and_back,frozen = learner(64),learner(64),learner(64)

    # the optimizer first, then the move
    early.create_opt()
    early.opt.set_hypers(mom=.8)
    ref.create_opt()
    ref.opt.set_hypers(mom=.8)
    before = vec(early)
    early.to_xla()
    assert {id(p) for p,*_ in early.opt.all_params()} == {id(p) for p in early.model.parameters()}
    fit(early, 2); fit(ref, 2)
    early.detach_xla()
    same(early, ref, what='optimizer before the move')
    assert (vec(early)-before).norm() > .1*before.norm() and early.opt.hypers == ref.opt.hypers and early.opt.hypers[0]['mom'] == .8

    # CPU, XLA, CPU, XLA: momentum and the order of samples go on
    ref = learner(64)
    fit(ref, 1); fit(ref, 1); fit(ref, 1); fit(ref, 1)
    o = there_and_back
    ps = list(o.model.parameters())
    fit(o, 1)
    with o.xla_ctx(): fit(o, 1)
    fit(o, 1)
    o.to_xla(); fit(o, 1); o.detach_xla()
    same(o, ref, what='there and back')
    assert all(a is b for a,b in zip(ps, o.model.parameters())) and type(o) is Learner and {cb.name for cb in o.cbs} == {cb.name for cb in ref.cbs}
    for a,b in zip(o.opt.all_params(), ref.opt.all_params()): assert torch.allclose(a[2]['grad_avg'], b[2]['grad_avg'], atol=1e-5) and a[2]['grad_avg'].device.type == 'cpu'
    assert torch.autograd.is_multithreading_enabled() == threading_was

    # frozen before the move
    ref = learner(64, splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    frozen = learner(64, splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    w = frozen.model[0].weight.detach().clone()
    for o in (ref, frozen): o.freeze()
    frozen.to_xla()
    fit(frozen, 1); fit(ref, 1)
    frozen.detach_xla()
    same(frozen, ref, what='frozen')
    assert torch.equal(frozen.model[0].weight, w) and frozen.opt.frozen_idx == 1
    assert [p.requires_grad for p in frozen.model.parameters()] == [False]*2 + [True]*2

    # an error leaves the device, too
    try:
        with o.xla_ctx(): raise ValueError
    except ValueError: pass
    assert type(o) is Learner and {p.device.type for p in o.model.parameters()} == {'cpu'}
    ''')

def test_tied_weights():
    "One tensor under two names stays one, on the way to the cores and to a device, and back"
    run('''
    from fastai.callback.rnn import ModelResetter, RNNCallback
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    emulate_cores(2)
    n_words = 11
    class Tied(Module):
        def __init__(self):
            self.encoder,self.decoder = nn.Embedding(n_words, 6),nn.Linear(6, n_words)
            self.decoder.weight = self.encoder.weight
        def forward(self, x): return self.decoder(self.encoder(x))
    def awd():
        # no dropout, so that runs can be compared; with a `weight_p` of exactly 0 fastai's `WeightDropout` stumbles over its own parameter
        config = {k: 0. if k.endswith('_p') else v for k,v in awd_lstm_lm_config.items()}
        return get_language_model(AWD_LSTM, n_words, {**config, 'weight_p':1e-12, 'emb_sz':6, 'n_hid':5, 'n_layers':1})
    # AWD_LSTM hands its hidden state on from batch to batch, so each row of a batch must follow the same row of the last one
    text = (torch.arange(96*4)**2 % n_words).reshape(96, 4)
    def make(model, bs):
        dls = DataLoaders.from_dsets(list(zip(text[:64], text[:64]*3 % n_words)), list(zip(text[64:], text[64:])), bs=bs, shuffle=False, device='cpu', num_workers=0)
        return learner(bs, model=model, dls=dls, metrics=[], cbs=[ModelResetter(), RNNCallback()] if model is awd else None)
    def n_params(o): return len({id(p) for p in o.model.parameters()})
    def check(o, n):
        ws = [v for k,v in o.model.named_parameters(remove_duplicate=False) if k.endswith(('encoder.weight', 'decoder.weight'))]
        assert len(ws) == 2 and ws[0] is ws[1] and n_params(o) == n
        state = o.model.state_dict()
        if ws[0].device.type == 'cpu': assert len({v.data_ptr() for k,v in state.items() if k.endswith(('encoder.weight', 'decoder.weight'))}) == 1
    class Count(Callback):
        def after_fit(self): self.n,self.device = n_params(self.learn),str(next(self.learn.model.parameters()).device)
    refs = {}
    for model in Tied, awd:
        ref,learn,count = make(model, 16),make(model, 8),Count()
        n = n_params(ref)
        check(learn, n)
        with learn.no_logging(), ref.no_logging(): learn.xla_fit(1, cbs=count); ref.fit(1)
        assert count.n == n and 'xla' in count.device
        check(learn, n)
        same(learn, ref, what=f'cores {model}')
        refs[model] = ref,n
    untouched()
    for model,(ref,n) in refs.items():
        learn = make(model, 16).to_xla()
        check(learn, n)
        with learn.no_logging(): learn.fit(1)
        check(learn, n)
        learn.path = Path()
        learn.save('tied')
        check(learn, n)
        learn.detach_xla()
        check(learn, n)
        same(learn, ref, what=f'one device {model}')
        other = make(model, 16)
        other.path = Path()
        other.load('tied')
        check(other, n)
        assert diff(other, learn) == 0
    ''')

def test_frozen_groups():
    "A frozen body stays as it is except for its BatchNorm; learning rates are those of the groups"
    run('''
    def body_head(): return nn.Sequential(nn.Sequential(nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, 10))
    def make(bs, opt_func=sgd): return learner(bs, model=body_head, opt_func=opt_func, splitter=lambda m: [params(m[0]), params(m[1])])
    def quiet(o, verb, *args, **kwargs):
        with o.no_logging(): getattr(o, verb)(*args, **kwargs)
    class Thaw(Callback):
        "What a fit does to the frozen groups is seen afterwards"
        def before_epoch(self):
            if self.epoch == 1: self.learn.unfreeze()
    emulate_cores(2)
    # one core: BatchNorm sees the same batches as in plain fastai
    for n in 1, 2:
        learn,ref = make(64//n),make(64)
        for o in learn, ref: o.freeze()
        body,bn,head = learn.model[0][0],learn.model[0][1],learn.model[1]
        old = deepcopy(learn.model.state_dict())
        quiet(learn, 'xla_fit', 1, num_cores=n); quiet(ref, 'fit', 1)
        new = learn.model.state_dict()
        moved = {k for k in new if not torch.equal(new[k], old[k])}
        assert moved == {k for k in new if not k.startswith('0.0.')}, moved      # BatchNorm's own weights and statistics, and the head
        assert learn.opt.frozen_idx == ref.opt.frozen_idx == 1
        assert [p.requires_grad for p in learn.model.parameters()] == [p.requires_grad for p in ref.model.parameters()] == [False, True, True, True, True]
        if n == 1: assert diff(learn, ref) < 1e-5

        quiet(learn, 'xla_fit', 1, slice(1e-2, 1e-1), num_cores=n); quiet(ref, 'fit', 1, slice(1e-2, 1e-1))
        assert learn.opt.hypers == ref.opt.hypers and [h['lr'] for h in learn.opt.hypers] == [1e-2, 1e-1]
        old = deepcopy(learn.model.state_dict())
        quiet(learn, 'xla_fit_one_cycle', 2, slice(1e-3, 1e-2), cbs=Thaw(), num_cores=n); quiet(ref, 'fit_one_cycle', 2, slice(1e-3, 1e-2), cbs=Thaw())
        new = learn.model.state_dict()
        unmoved = [k for k in new if torch.equal(new[k], old[k])]
        assert not unmoved, unmoved
        assert [{k: v for k,v in h.items()} for h in learn.opt.hypers] == ref.opt.hypers and learn.opt.hypers[0]['lr'] < learn.opt.hypers[1]['lr']
        assert learn.opt.frozen_idx == ref.opt.frozen_idx == 0 and all(p.requires_grad for p in learn.model.parameters())
        if n == 1:
            # torch_xla takes the biased variance into `running_var`, torch the unbiased one, so validation differs
            assert diff(learn, ref) < 1e-5 and np.allclose(learn.recorder.losses, ref.recorder.losses, atol=1e-5)
            stats,rstats = ([m.running_mean, m.running_var, m.num_batches_tracked] for m in (bn, ref.model[0][1]))
            for a,b,tol in zip(stats, rstats, (1e-5, 1/63, 0)): assert torch.allclose(a, b, rtol=tol, atol=tol), (a, b)
        assert learn.model[0][0] is body and learn.model[0][1] is bn and learn.model[1] is head
    untouched()
    ''')

def test_start_of_training():
    "Cores that start apart are brought together; dropout differs between them; the same seed gives the same run (case 24)"
    run('''
    emulate_cores(4)
    class Apart(Callback):
        "Each core starts from weights of its own; the master's count"
        order = -20
        def before_fit(self):
            with torch.no_grad():
                for p in self.learn.model.parameters(): p.add_(torch.full(p.shape, float(ordinal())).to(p.device))
            sync()
    for n in 2, 4:
        learn,ref = learner(64//n),learner(64)
        hashes = Hashes(f'apart{n}')
        with learn.no_logging(), ref.no_logging(): learn.xla_fit(2, cbs=[Apart(), hashes], num_cores=n); ref.fit(2)
        hashes.check(n, 2)
        same(learn, ref, what=f'{n} cores')

    class Noisy(Module):
        def forward(self, x):
            keep = F.dropout(torch.ones_like(x), .5, self.training)
            if self.training: self.masks.append((keep != 0).sum(-1))
            return x*keep
    class Masks(Callback):
        "A file per core: how many of a layer's inputs dropout has let through, for each item of each batch"
        def __init__(self, folder): self.folder = Path(folder); self.folder.mkdir()
        def before_fit(self): self.learn.model[0].masks = []
        def after_fit(self): (self.folder/str(ordinal())).write_text(str([o.tolist() for o in self.learn.model[0].masks])); self.learn.model[0].masks = []
        def read(self): return [o.read_text() for o in sorted(self.folder.iterdir())]
    def dropout(): return nn.Sequential(Noisy(), *mlp())
    def drop(folder, **kwargs):
        learn,masks = learner(16, model=dropout),Masks(folder)
        with learn.no_logging(): learn.xla_fit(1, cbs=masks, **kwargs)
        return learn,masks.read()
    (a,ma),(b,mb),(c,mc),(d,md) = drop('a', seed=3),drop('b', seed=3),drop('c', seed=4),drop('d')
    assert len(set(ma)) == 4, 'dropout is the same on some cores'
    batches = eval(ma[0])
    assert len(batches) == 5 and len(set(map(str, batches))) == 5 and len(set(batches[0])) > 1, 'dropout is the same for all batches or items'
    assert diff(a, b) == 0 and ma == mb
    assert not set(ma) & set(mc) and not set(ma) & set(md) and diff(a, c) > 1e-3 and diff(a, d) > 1e-3
    untouched()
    ''')

def test_cores_and_samples():
    "`num_cores` says how many there are; every item is seen once per epoch, with the same number of steps on each core (cases 11, 26, 60)"
    run('''
    emulate_cores(8)
    class Seen(Callback):
        "A file per core, epoch and phase with the numbers of the items that count"
        order = 50   # after the padding of a last, short batch is taken off
        def __init__(self, folder): self.folder = Path(folder); self.folder.mkdir()
        def before_fit(self): (self.folder/f'world-{ordinal()}').write_text(str(world_size()))
        def before_train(self): self.ids = []
        before_validate = before_train
        def after_batch(self): self.ids.append(self.learn.yb[0][:,0].clone())
        def after_train(self): self._write('train')
        def after_validate(self): self._write('valid')
        def _write(self, what): (self.folder/f'{what}-{self.epoch}-{ordinal()}').write_text(str([o.int().tolist() for o in self.ids]))
        def worlds(self): return {int(o.name.split('-')[1]): int(o.read_text()) for o in self.folder.glob('world-*')}
        def read(self, what, epoch): return [eval(o.read_text()) for o in sorted(self.folder.glob(f'{what}-{epoch}-*'))]
    def make(bs, n=80, drop_last=False):
        ids = [(tensor([float(i), 1.]), tensor([float(i)])) for i in range(1000)]
        dls = DataLoaders.from_dsets(ids[:n], ids[500:540], bs=bs, shuffle=(True, False), drop_last=(drop_last, False), device='cpu', num_workers=0)
        return learner(bs, model=lambda: nn.Linear(2, 1), dls=dls, lr=1e-9, loss_func=MSELossFlat(), metrics=[])
    def fit(o, folder, n_epoch=1, **kwargs):
        seen = Seen(folder)
        with o.no_logging(): o.xla_fit(n_epoch, cbs=seen, **kwargs)
        return seen
    learn = make(8)
    for i,(asked,n) in enumerate([(1,1), (None,8), (3,3), (8,8), (1,1)]):
        seen = fit(learn, f'n{i}', num_cores=asked)
        assert seen.worlds() == {o: n for o in range(n)}, (asked, seen.worlds())
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    for n in 0, -1, 9, 16, '8', True, 2.:
        try: fit(learn, f'bad{n!r}', num_cores=n)
        except ValueError as e: assert f'num_cores={n!r}' in str(e) and 'from 1 to 8' in str(e) and 'FASTAI_XLA_CORES' in str(e), e
        else: assert False, f'num_cores={n!r} is accepted'
    assert not forks

    def check(o, seen, epochs, n, steps, n_train=80):
        orders = []
        for e in epochs:
            train,valid = seen.read('train', e),seen.read('valid', e)
            assert len(train) == len(valid) == n and {len(o) for o in train} == {steps}, (e, [len(o) for o in train])
            per_step = [[i for core in train for i in core[s]] for s in range(steps)]
            full = 8*n
            assert all(len(s) == len(set(s)) == full for s in per_step[:n_train//full]), 'a step holds an item twice'
            assert set(sum(per_step, [])) == set(range(n_train)) and len(set(sum(per_step[:n_train//full], []))) == full*(n_train//full)
            assert set(per_step[-1]) == set(range(n_train)) - set(sum(per_step[:n_train//full], [])) or n_train % full == 0
            assert sorted(i for core in valid for b in core for i in b) == list(range(500, 540)), 'each item to validate exactly once'
            orders.append(train)
        assert all(a != b for a,b in zip(orders, orders[1:])), 'the same order in two epochs'
    # 80 items in steps of 64, of 24 and of 16
    for n,steps in (8,2), (3,4), (2,5):
        learn = make(8)
        seen = fit(learn, f's{n}', 4, num_cores=n)
        check(learn, seen, range(4), n, steps)
        assert len(learn.recorder.losses) == 4*steps
        check(learn, fit(learn, f's{n} again', num_cores=n), range(1), n, steps)
    assert len(fit(make(8, drop_last=True), 'dropped').read('train', 0)[0]) == 1
    seen = fit(make(8), 'seeds', 2, num_cores=2, seed=5),fit(make(8), 'seeds again', 2, num_cores=2, seed=5),fit(make(8), 'other seed', 2, num_cores=2, seed=6)
    a,b,c = ([o.read('train', e) for e in range(2)] for o in seen)
    assert a == b and a[0] != a[1] and a[0] != c[0]
    try: fit(make(8, n=60, drop_last=True), 'too few')
    except ValueError as e: assert '60 items' in str(e) and '8 cores x bs 8 = 64' in str(e), e
    else: assert False
    assert not mp.active_children()
    untouched()
    ''')

def test_faults():
    "An error in a callback on one core, at any event: the caller gets it, its learner is as before, and the next call works"
    run('''
    emulate_cores(4)
    class Boom(Exception): pass
    class Raises(Callback):
        def __init__(self, event): self.event = event; setattr(self, event, self._raise)
        def _raise(self):
            if ordinal() == 3 and (self.event != 'after_batch' or (self.training and self.iter == 2)): raise Boom('boom-7')
    learn,ref = learner(16),learner(64)
    with learn.no_logging(), ref.no_logging(): learn.xla_fit(1); ref.fit(1)
    start,history,opt,rng = vec(learn),deepcopy(learn.recorder.values),deepcopy(learn.opt.state_dict()),learn.dls.train.rng.getstate()
    for event in 'before_fit', 'after_batch', 'after_validate':
        began = time.monotonic()
        try:
            with learn.no_logging(): learn.xla_fit(2, cbs=Raises(event))
        except Boom as e: assert str(e).startswith('core 3 of 4: ') and 'boom-7' in str(e) and event in str(e) and "raise Boom('boom-7')" in str(e.__cause__), (e, e.__cause__)
        else: assert False, f'no error from {event}'
        assert time.monotonic()-began < 15
        untouched()
        assert torch.equal(vec(learn), start) and learn.recorder.values == history and learn.dls.train.rng.getstate() == rng
        assert str(learn.opt.state_dict()) == str(opt) and not hasattr(learn, 'raises') and {p.device.type for p in learn.model.parameters()} == {'cpu'}
        assert type(learn) is Learner and learn.logger is print
    with learn.no_logging(), ref.no_logging(): learn.xla_fit(1); ref.fit(1)
    same(learn, ref, what='after the faults')

    class Killed(Callback):
        def after_batch(self):
            if self.iter == 2: os.kill(os.getpid(), signal.SIGKILL)
    try: learn.xla_fit(1, cbs=Killed()); assert False
    except RuntimeError as e: assert 'killed by signal 9' in str(e) and 'memory' in str(e), e
    class Stop(Callback):
        def after_batch(self): time.sleep(60)
    threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try: learn.xla_fit(1, cbs=Stop()); assert False
    except KeyboardInterrupt: pass
    with learn.no_logging(), ref.no_logging(): learn.xla_fit(1); ref.fit(1)
    same(learn, ref, what='after a kill and a stop')
    untouched()
    ''')

def test_steady_batches():
    """After the first epoch nothing is compiled. A batch is one execution on each core and no transfer to the host, besides the
    reading of all losses so far, which the master does twice a second. A short last batch has its inputs, predictions and
    targets cut to size on the host; in validation the loss comes with them"""
    run('''
    import torch_xla.debug.metrics as met
    emulate_cores(4)
    def total(name): return (met.metric_data(name) or [0])[0]
    together = threading.Barrier(4)   # cores are threads here, and the counters those of the process
    class Counts(Callback):
        "Compilations, executions and transfers after each batch"
        order = 1001   # after the cores have agreed on the order of an epoch
        def __init__(self, cores): self.cores,self.rows = cores,[]
        def _count(self):
            if self.cores > 1: together.wait()
            time.sleep(.03)   # an execution is counted at its end, in another thread
            self.rows.append((self.epoch, self.training, total('CompileTime'), total('ExecuteTime'), total('TransferFromDeviceTime')))
            if self.cores > 1: together.wait()
        def before_train(self): self._count()
        def after_batch(self): self._count()
        def check(self):
            later = [o for o in self.rows if o[0] > 0]
            assert len({o[2] for o in later}) == 1, f'compiled after the first epoch: {self.rows}'
            assert any(o[2] < later[0][2] for o in self.rows)    # it did count
            n = self.cores
            steps = [(b[3]-a[3], b[4]-a[4]) for a,b in zip(later, later[1:]) if a[:2] == b[:2] == (b[0], True)]
            read = lambda steps: [s[1]-w for s,w in zip(steps, [0]*4+[3*n]+[0]*4+[3*n])]
            assert [o[0] for o in steps] == [n]*10 and all(0 <= o <= 1 for o in read(steps)) and sum(read(steps)) <= 4, steps
            vals = [(b[3]-a[3], b[4]-a[4]) for a,b in zip(later, later[1:]) if a[:2] == b[:2] == (b[0], False)]
            assert vals == [(n, 0), (n, 6*n)]*2, vals   # metrics of the short last batch are taken on the host
    for clip in None, .1:
        learn,counts = learner(16, n=300, cbs=GradientClip(clip) if clip else None),Counts(4)
        with learn.no_logging(): learn.xla_fit(3, cbs=counts)
        counts.check()
    untouched()
    learn,counts = learner(64, n=300).to_xla(),Counts(1)
    with learn.no_logging(): learn.fit(3, cbs=counts)
    counts.check()
    ''')

def test_twenty_fits():
    "Fit after fit in one process: nothing hangs, nothing piles up, and each gives the same weights"
    run('''
    emulate_cores(4)
    def state(): gc.collect(); return len(os.listdir('/proc/self/fd')), threading.active_count(), len(os.listdir(tempfile.gettempdir())), mp.active_children()
    states,weights = [],[]
    for i in range(20):
        learn = learner(4, n=48, model=lambda: nn.Linear(64, 10), metrics=[])
        with learn.no_logging(): learn.xla_fit(1)
        states.append(state()); weights.append(vec(learn))
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert states == [states[0]]*20 and not states[0][-1], states
    untouched()
    ''', env={'TMPDIR':'.'})

def test_output():
    "One line says what a step is; the line of an epoch comes when that epoch ends, from a pipe too; `no_logging` is silent (case 60)"
    res = run('''
    emulate_cores(2)
    class Slow(Callback):
        def before_train(self): time.sleep(.6)
    if sys.argv[1:]:
        learner(16, cbs=ProgressCallback()).xla_fit(3, cbs=Slow())
        sys.exit()
    os.environ.pop('PYTHONUNBUFFERED', None)
    p = subprocess.Popen([sys.executable, __file__, 'child'], stdout=subprocess.PIPE, text=True)
    lines = [(time.monotonic(), l.split()) for l in p.stdout]
    end = time.monotonic()
    assert p.wait() == 0
    times,rows = zip(*lines)
    ref = learner(32)
    with ref.no_logging(): ref.fit(3)
    assert rows[0] == '2 cores x bs 16 = 32 a step, 10 steps an epoch'.split(), rows
    assert rows[1] == ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'time'] and [r[0] for r in rows[2:]] == ['0', '1', '2'], rows
    assert np.allclose([[float(o) for o in r[1:4]] for r in rows[2:]], ref.recorder.values, atol=1e-5), rows
    assert all(b-a > .5 for a,b in zip(times[2:], times[3:])) and times[2]-times[0] > .5 and end-times[2] > 1, times

    # a logger of one's own gets the rows as fastai gives them
    own,theirs = [],[]
    learn,ref = learner(16),learner(32)
    learn.logger,ref.logger = own.append,theirs.append
    buf = io.StringIO()
    with contextlib.redirect_stdout(buf): learn.xla_fit(2)
    ref.fit(2)
    assert len(own) == len(theirs) == 2 and all(np.allclose(list(a)[:-1], list(b)[:-1], atol=1e-5) and isinstance(a[-1], str) for a,b in zip(own, theirs)), (own, theirs)
    assert buf.getvalue().strip() in ('', '2 cores x bs 16 = 32 a step, 10 steps an epoch')
    with learn.no_logging(): learn.xla_fit(1)
    untouched()
    ''')
    assert res.split() == ['finished'], res   # nothing but what is printed here

def test_notebook(tmp_path):
    "In a notebook: what its cells define is there on the cores, though nothing of it can be pickled, and the lines show under the cell"
    cells = [START + "emulate_cores(2)", '''
        class Scale(Transform):
            def __init__(self, by): self.fn = lambda o: o/by
            def encodes(self, o): return self.fn(o)
        class Count(Callback):
            def __init__(self): self.trained = 0
            def after_batch(self): self.trained += self.training
        class Net(nn.Module):
            def __init__(self): super().__init__(); self.lin,self.act = nn.Linear(64, 10),lambda x: x*1.5
            def forward(self, x): return self.act(self.lin(x))
        def wrong(preds, targs): return (preds.argmax(-1) != targs).float().mean()
        def make(bs):
            dsets = Datasets(range_of(400), [[lambda i: X[i], Scale(2)], [lambda i: Y[i]]], splits=RandomSplitter(seed=1)(range_of(400)))
            dls = dsets.dataloaders(bs=bs, device='cpu', num_workers=0, after_batch=ItemTransform(lambda b: (b[0]*2, b[1])), drop_last=False)
            return learner(bs, model=Net, dls=dls, metrics=wrong)''',
        'learn,count = make(16),Count()', 'learn.xla_fit(2, cbs=count)', 'learn.xla_fit(1)', '''
        ref = make(32)
        with ref.no_logging(): ref.fit(2); ref.fit(1)
        same(learn, ref)
        assert count.trained == 2*10
        untouched()''']
    (tmp_path/'cells.json').write_text(json.dumps([dedent(o) for o in cells]))
    run_code(f'''
    import json
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook
    nb = new_notebook(cells=[new_code_cell(o) for o in json.load(open({str(tmp_path/'cells.json')!r}))])
    NotebookClient(nb, timeout=120, kernel_name='python3').execute()
    texts = [''.join(o['text'] for o in nb.cells[i].outputs if o['output_type'] == 'stream' and o['name'] == 'stdout').splitlines() for i in (3,4)]
    rows = [[l.split() for l in t] for t in texts]
    for r,n in zip(rows, (2,1)):
        assert r[0] == '2 cores x bs 16 = 32 a step, 10 steps an epoch'.split(), texts
        assert r[1] == ['epoch', 'train_loss', 'valid_loss', 'wrong', 'time'] and [o[0] for o in r[2:]] == [str(i) for i in range(n)], texts
    ''', env={'IPYTHONDIR':tmp_path})
