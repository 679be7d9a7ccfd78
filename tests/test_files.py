"Files written and learners copied while on XLA, and the way back: afterwards the learner is as if it had never been there"
import pytest
from helpers import ROOT,run_code

common = r'''
import gc,pickle,pickletools,sys,types,zipfile
import torch.nn.functional as F
import sys
from copy import deepcopy
from fastai.vision.all import *
from sklearn.datasets import load_digits

images,labels = load_digits(return_X_y=True)
def get_x(i): return (images[i]*15).astype(np.uint8).reshape(8,8)
def get_y(i): return labels[i]

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(64,16), nn.ReLU(), nn.Linear(16,10))
class Tied(nn.Module):
    "The decoder's bias-free matrix is the encoder's"
    def __init__(self):
        super().__init__()
        self.enc,self.dec,self.out = nn.Linear(64,64),nn.Linear(64,64,bias=False),nn.Linear(64,10)
        self.dec.weight = self.enc.weight
    def forward(self, x): return self.out(self.dec(F.relu(self.enc(x.flatten(1)))))

def get_learner(model=mlp, **kwargs):
    "Small and always the same; its loss and its batch transform hold tensors"
    set_seed(42)
    block = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=get_x, get_y=get_y, splitter=RandomSplitter(seed=42),
                      batch_tfms=Normalize.from_stats([.3], [.4]))
    dls = block.dataloaders(range(300), bs=32, num_workers=0, device=torch.device('cpu'))
    learn = Learner(dls, model(), **{**dict(loss_func=CrossEntropyLossFlat(weight=torch.linspace(.5,1.5,10)), metrics=accuracy, lr=.01), **kwargs})
    learn.remove_cb(ProgressCallback)
    return learn

class RunningMean(Callback):
    "Keeps a tensor on the device from one fit to the next"
    mean = None
    def after_batch(self):
        m = self.learn.pred.detach().mean(0)
        self.mean = m if self.mean is None else self.mean*.9 + m*.1

def fit(learn, n=1, seed=0, **kwargs):
    "Epochs in an order that depends on `seed` alone"
    learn.dls.train.rng.seed(seed)
    with learn.no_logging(): learn.fit(n, **kwargs)
    return learn

def weights(o): return torch.cat([p.detach().cpu().flatten() for p in getattr(o, 'model', o).parameters()])
def opt_state(opt):
    "All numbers that the optimizer keeps for its parameters, in order"
    while hasattr(opt, 'opt'): opt = opt.opt
    ps = L(opt.param_lists if isinstance(opt, Optimizer) else [g['params'] for g in opt.param_groups]).concat()
    return torch.cat([tensor(v).detach().cpu().float().flatten() for p in ps for _,v in sorted(opt.state[p].items())])
def far(a, b): return ((a-b).norm()/b.norm()).item()
def same(a, b, eps=0.):
    "Weights, optimizer state and hypers of two learners"
    d = far(weights(a), weights(b)), far(opt_state(a.opt), opt_state(b.opt))
    assert max(d) <= eps, d
    assert list(map(dict, a.opt.hypers)) == list(map(dict, b.opt.hypers))

def test_items(learn): return learn.dls.test_dl(range(300, 400))

def strings(file):
    "Every string in the pickle of a file of torch: names of modules, classes, attributes and devices"
    with zipfile.ZipFile(file) as z: data = z.read(first(z.namelist(), lambda o: o.endswith('/data.pkl')))
    return {o for _,o,_ in pickletools.genops(data) if isinstance(o, str)}
def no_xla(file):
    found = sorted(o for o in strings(file) if 'xla' in o.replace(sys.prefix, '').lower())   # the environment's own path may have the library's name
    assert not found, (file, found)

def reachable(o):
    "`o` and all objects that can be reached from it, without modules, classes and functions"
    seen,todo = {id(o): o},[o]
    while todo:
        x = todo.pop()
        for r in gc.get_referents(x) + [g for g in [isinstance(x, Tensor) and x.is_leaf and x.grad] if isinstance(g, Tensor)]:
            if id(r) in seen or isinstance(r, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)): continue
            seen[id(r)] = r
            todo.append(r)
    return list(seen.values())
def on_xla(o): return [t for t in reachable(o) if isinstance(t, Tensor) and t.device.type == 'xla']

def is_plain(learn, like):
    "Whether `learn` can't be told from `like`, a learner that did the same and never was on XLA"
    assert type(learn) is type(like) and vars(learn).keys() == vars(like).keys(), vars(learn).keys() ^ vars(like).keys()
    assert [type(o) for o in learn.cbs] == [type(o) for o in like.cbs]
    assert [vars(o).keys() for o in learn.cbs] == [vars(o).keys() for o in like.cbs]
    assert learn.dls.device == like.dls.device and [o.device for o in learn.dls.loaders] == [o.device for o in like.dls.loaders]
    assert {p.device for p in learn.model.parameters()} == {torch.device('cpu')}
    assert [p.requires_grad for p in learn.model.parameters()] == [p.requires_grad for p in like.model.parameters()]
    assert learn.loss_func.func.weight.device.type == learn.dls.train.after_batch[-1].mean.device.type == 'cpu'
    assert not on_xla(learn), on_xla(learn)
'''

@pytest.fixture
def run(tmp_path):
    "Run code that sees `common`, each time in a fresh process, always in the same directory"
    (tmp_path/'lib').mkdir(); (tmp_path/'cwd').mkdir()
    (tmp_path/'lib'/'common.py').write_text(common, encoding='utf-8')
    return lambda code: run_code(code, env={'PYTHONPATH': f"{ROOT}:{tmp_path/'lib'}"}, cwd=tmp_path/'cwd')

def test_files_load_without_xla(run):
    "Exported learners and saved weights are plain: they load where nothing of XLA is installed, and predict the same (case 16)"
    run('''
    from common import *
    from fastai_xla_extensions.all import *
    emulate_cores(2)

    learn = get_learner(cbs=ProgressCallback)
    learn.xla_fit(1)
    learn.export('b.pkl')
    torch.save(learn.get_preds(dl=test_items(learn))[0], 'b.pt')

    learn = get_learner(cbs=[ProgressCallback, MixUp])   # MixUp keeps tensors of the device
    learn.to_xla().fit(1)
    assert on_xla(learn.mix_up)
    learn.save('m'); learn.save('weights', with_opt=False); learn.export('a.pkl')
    learn.remove_cb(MixUp)
    _,i,probs = learn.predict(350)
    torch.save(dict(preds=learn.get_preds(dl=test_items(learn))[0], i=int(i), probs=probs.cpu(), weights=weights(learn), opt=opt_state(learn.opt)), 'a.pt')
    for f in ('a.pkl', 'b.pkl', 'models/m.pth', 'models/weights.pth'): no_xla(f)
    ''')
    run('''
    import sys
    sys.modules.update(torch_xla=None, fastai_xla_extensions=None)   # importing them fails
    from common import *

    ref = torch.load('a.pt')
    def close(a, b): assert type(a) is Tensor and a.shape == b.shape and (a-b).abs().max() < 1e-5, (a, b)
    for f,preds in (('a.pkl', ref['preds']), ('b.pkl', torch.load('b.pt'))):
        learn = load_learner(f)
        assert type(learn) is Learner and learn.dls.device.type == 'cpu'
        learn.remove_cb(ProgressCallback)
        close(learn.get_preds(dl=test_items(learn))[0], preds)
        if f == 'a.pkl':
            _,i,probs = learn.predict(350)
            assert int(i) == ref['i']
            close(probs, ref['probs'])
        learn.dls = get_learner().dls
        before = weights(learn)
        fit(learn)   # it can be trained on
        assert far(weights(learn), before) > 1e-3

    for f in ('models/m.pth', 'models/weights.pth'):
        state = torch.load(f, weights_only=False)
        tensors = [t for t in reachable(state) if isinstance(t, Tensor)]
        assert tensors and {type(t) for t in tensors} == {Tensor} and {t.device.type for t in tensors} == {'cpu'}
    learn = get_learner().load('m')
    assert far(weights(learn), ref['weights']) == far(opt_state(learn.opt), ref['opt']) == 0.
    learn = get_learner().load('weights', with_opt=False)
    assert far(weights(learn), ref['weights']) == 0.
    ''')

def test_going_on_after_a_file(run):
    "Writing a file or a copy changes nothing, and `load` brings all of it back"
    run('''
    from common import *
    from fastai_xla_extensions.all import *

    ref,cpu,learn = [get_learner(cbs=RunningMean) for _ in range(3)]
    ref.to_xla(); learn.to_xla()
    for o in (ref, cpu, learn): fit(o, seed=1)
    ps = list(learn.model.parameters())
    learn.save('m'); learn.save('weights', with_opt=False); learn.export('a.pkl')
    copies = [deepcopy(learn), pickle.loads(pickle.dumps(learn))]
    assert all(p is q for p,q in zip(learn.model.parameters(), ps)) and all(p.device.type == 'xla' for p in ps)
    assert {o.device.type for o in (learn.dls, learn.dls.train.after_batch[-1].mean, learn.loss_func.func.weight, learn.running_mean.mean)} == {'xla'}
    same(learn, ref)

    for o in (ref, cpu, learn): fit(o, seed=2)
    same(learn, ref)
    same(learn, cpu, 1e-4)
    for o in (ref, cpu): assert torch.allclose(learn.running_mean.mean.cpu(), o.running_mean.mean.cpu(), atol=1e-5)

    for o in copies:   # on XLA like the original, and independent of it
        assert type(o) is type(learn) and not {id(p) for p in o.model.parameters()} & set(map(id, ps)) and {p.device.type for p in o.model.parameters()} == {'xla'}
        same(fit(o, seed=2), learn)
        assert type(o.detach_xla()) is Learner and not on_xla(o)

    fit(learn, seed=3)   # away from what was saved
    assert learn.load('m') is learn and {p.device.type for p in learn.model.parameters()} == {'xla'}
    same(fit(learn, seed=2), ref)
    new = get_learner().to_xla().load('m')   # with an optimizer of its own, made by `load`
    same(fit(new, seed=2), ref)
    new = get_learner().load('m').to_xla()
    same(fit(new, seed=2), ref)
    w = weights(get_learner().load('weights', with_opt=False))
    assert far(weights(get_learner().to_xla().load('weights', with_opt=False)), w) == 0.
    ''')

def test_callbacks_that_write(run):
    "`SaveModelCallback` and the learning rate finder save in the middle of a fit, and load at its end"
    run('''
    from common import *
    from fastai_xla_extensions.all import *

    learn,cpu = [get_learner(metrics=[accuracy, F1Score(average='macro'), RocAuc()]) for _ in range(2)]
    learn.to_xla()
    for o in (learn, cpu):
        spoil = ParamScheduler({'lr': lambda p: .01 if p < .5 else 5.})   # the last epochs are worse than the one before
        fit(o, 4, cbs=[SaveModelCallback(fname=f'best_{id(o)}', with_opt=True), spoil])
    vals = [o[1] for o in cpu.recorder.values]
    assert min(vals) == vals[1]
    assert np.allclose(learn.recorder.values[:2], cpu.recorder.values[:2], atol=1e-5) and len(cpu.recorder.values[0]) == 5
    same(learn, cpu, 1e-4)
    assert abs(learn.validate()[0] - vals[1]) < 1e-4
    file = learn.path/learn.model_dir/f'best_{id(learn)}.pth'
    no_xla(file)
    assert {t.device.type for t in reachable(torch.load(file, weights_only=False)) if isinstance(t, Tensor)} == {'cpu'}

    learn,cpu = get_learner().to_xla(),get_learner()
    for o in (learn, cpu): fit(o)
    before,state = weights(learn),opt_state(learn.opt)
    names = {o.name for o in learn.path.ls()} | {o.name for o in (learn.path/'models').ls()}
    a,b = [o.lr_find(num_it=40, show_plot=False, suggest_funcs=(minimum,steep,valley,slide)) for o in (learn, cpu)]
    assert np.allclose(a, b, rtol=1e-4), (a, b)
    assert np.allclose(learn.recorder.losses, cpu.recorder.losses, rtol=1e-3)
    assert far(weights(learn), before) == far(opt_state(learn.opt), state) == 0.
    assert names == {o.name for o in learn.path.ls()} | {o.name for o in (learn.path/'models').ls()}
    for o in (learn, cpu): fit(o, seed=1)
    same(learn, cpu, 1e-4)
    ''')

def test_the_way_back(run):
    "`detach_xla` leaves a plain learner; so does `xla_ctx`, also after an error"
    run('''
    from common import *
    from fastai_xla_extensions.all import *

    class Keep(Callback):
        "Holds what callbacks of users hold"
        def before_fit(self): self.seen,self.by_name,self.best = [],{},None
        def after_batch(self):   # before, a short last batch has padding
            self.seen.append(self.learn.loss)
            self.by_name.setdefault('deep', []).append((self.learn.epoch, self.learn.pred))
            self.best = self.learn.pred

    ref,learn = get_learner(cbs=Keep),get_learner(cbs=Keep)
    never = get_learner(cbs=Keep)
    learn.to_xla()
    assert type(learn) is not Learner and isinstance(learn, Learner) and learn.dls.device.type == 'xla'
    assert {p.device.type for p in learn.model.parameters()} == {learn.loss_func.func.weight.device.type} == {'xla'}
    is_plain(learn.detach_xla(), never)   # without a fit in between
    assert learn.detach_xla() is learn
    is_plain(learn, never)

    n = len(learn.cbs)
    learn.to_xla()
    once,cls = [type(o) for o in learn.cbs],type(learn)
    learn.to_xla()   # twice is once
    assert [type(o) for o in learn.cbs] == once and len(once) > n and type(learn) is cls
    for o in (ref, learn): fit(o)
    assert on_xla(learn.keep)
    is_plain(learn.detach_xla(), ref)
    same(learn, ref, 1e-4)
    assert torch.allclose(learn.keep.best, ref.keep.best, atol=1e-4) and len(learn.keep.seen) == len(ref.keep.seen)
    same(fit(learn, seed=1), fit(ref, seed=1), 1e-4)   # on the CPU again
    for o in (ref, learn): o.fit_one_cycle(1)
    assert np.allclose(learn.get_preds()[0], ref.get_preds()[0], atol=1e-4)

    class Oops(Exception): pass
    class NoStep(Callback):
        def before_step(self): raise Oops('!')
    try:
        with learn.xla_ctx() as l:
            assert l is learn and next(learn.model.parameters()).device.type == 'xla'
            fit(learn)
            raise Oops('!')
    except Oops: is_plain(learn, fit(ref))
    else: assert False
    same(learn, ref, 1e-4)
    try:
        with learn.xla_ctx(): fit(learn, cbs=NoStep)
    except Oops: pass
    else: assert False
    try: fit(ref, cbs=NoStep)
    except Oops: pass
    is_plain(learn, ref)   # the error came when gradients, loss and predictions were there
    learn.opt.zero_grad(); ref.opt.zero_grad()
    same(fit(learn, seed=4), fit(ref, seed=4), 1e-4)
    ''')

def test_optimizers_frozen_and_tied(run):
    "All kinds of optimizers, frozen groups and tied weights survive both ways"
    run('''
    from common import *
    from fastai_xla_extensions.all import *
    import torch_xla.debug.metrics as met

    def groups(m): return L(m[:2], m[2:]).map(params)
    def adamw(ps, lr, **kwargs): return OptimWrapper(ps, torch.optim.AdamW, lr=lr)
    def sgd(ps, lr, **kwargs): return OptimWrapper(ps, torch.optim.SGD, lr=lr, momentum=.9)
    n_read = {}   # transfers from the device in an epoch
    def transfers(): return (met.metric_data('TransferFromDeviceTime') or [0])[0]
    for opt_func,eps in ((adamw, 1e-4), (sgd, 1e-5), (ranger, 1e-4), (Lamb, 1e-4), (partial(SGD, mom=.9), 1e-5), (partial(RMSProp, mom=.9), 1e-4)):
        learn,ref = [get_learner(opt_func=opt_func, splitter=groups) for _ in range(2)]
        for o in (learn, ref): fit(o, lr=slice(1e-3, 1e-2))   # the state of the CPU goes along
        learn.to_xla()
        start = transfers()
        fit(learn, seed=1, lr=slice(1e-3, 1e-2))
        n_read[opt_func] = transfers()-start
        fit(ref, seed=1, lr=slice(1e-3, 1e-2))
        state = [t for t in reachable(learn.opt) if isinstance(t, Tensor) and t.numel() > 1]
        assert len(state) > len(list(learn.model.parameters())) and {t.device.type for t in state} == {'xla'}, opt_func
        learn.save('m')
        is_plain(learn.detach_xla(), ref)
        same(learn, ref, eps)
        if hasattr(ref.opt, 'slow_weights'):
            assert learn.opt.count == ref.opt.count > learn.opt.k
            assert far(*[torch.cat([p.flatten() for p in o.opt.slow_weights.concat()]) for o in (learn, ref)]) < eps
        same(fit(learn, seed=2), fit(ref, seed=2), eps)
    assert n_read[adamw] == n_read[sgd], n_read   # AdamW counts its steps on the CPU

    learn,ref = [get_learner(splitter=groups) for _ in range(2)]
    for o in (learn, ref): o.freeze()
    first_layer = learn.model[1].weight.detach().clone()
    learn.to_xla()
    for o in (learn, ref): fit(o)
    assert learn.opt.frozen_idx == 1 and torch.equal(learn.model[1].weight.cpu(), first_layer)
    learn.save('m'); ref.save('m_cpu'); learn.load('m'); ref.load('m_cpu')
    is_plain(learn.detach_xla(), ref)
    assert learn.opt.frozen_idx == 1 and torch.equal(learn.model[1].weight, first_layer)
    same(learn, ref, 1e-4)
    learn.to_xla()
    for o in (learn, ref): o.unfreeze(); fit(o, seed=1)
    assert not torch.equal(learn.model[1].weight.cpu(), first_layer)
    same(learn, ref, 1e-4)
    is_plain(learn.detach_xla(), ref)

    learn,ref = [get_learner(Tied) for _ in range(2)]
    ps = list(learn.model.parameters())
    def tied(o): return o.model.dec.weight is o.model.enc.weight
    with learn.xla_ctx():
        fit(learn)
        assert tied(learn) and tied(deepcopy(learn)) and len(list(learn.model.parameters())) == len(ps) == 4
        learn.save('m'); learn.load('m')
        assert tied(learn)
        learn.export('t.pkl')
        no_xla('t.pkl')
        assert tied(learn)
        fit(learn, seed=1)
    assert tied(learn) and tied(load_learner('t.pkl')) and all(p is q for p,q in zip(learn.model.parameters(), ps))
    fit(ref); fit(ref, seed=1)
    same(learn, ref, 1e-4)
    ''')

def test_tensors_outside_the_state(run):
    "Tensors that a model or a transform keeps as an attribute go into no file and stay on no device; torch's own loaders have nothing to move"
    run('''
    from common import *
    from fastai_xla_extensions.all import *

    class Stateful(nn.Module):
        "Holds its last activations, as recurrent models of fastai do"
        def __init__(self): super().__init__(); self.lin,self.hidden = nn.Linear(64,10),None
        def forward(self, x):
            y = self.lin(x.flatten(1))
            self.hidden = [y.detach().mean(0)]
            return y
    learn = get_learner(Stateful).to_xla()
    fit(learn)
    assert on_xla(learn.model.hidden)
    learn.export('s.pkl')
    assert on_xla(learn.model.hidden)
    no_xla('s.pkl')
    fit(learn)
    assert not on_xla(learn.detach_xla())

    learn = get_learner()
    for dl in learn.dls.loaders: dl.after_batch.add(aug_transforms(do_flip=False, max_lighting=.5, p_lighting=1.))
    learn.to_xla()
    fit(learn)
    learn.dls.one_batch()   # the transforms keep what they have drawn for this batch
    learn.export('t.pkl')
    no_xla('t.pkl')
    fit(learn, seed=1)
    learn.dls.one_batch()
    assert not on_xla(learn.detach_xla())
    fit(learn, seed=2)

    from torch.utils.data import DataLoader as TorchDL
    ds = [(torch.randn(64), i%10) for i in range(100)]
    def torch_learner():
        set_seed(1)
        learn = Learner(DataLoaders(TorchDL(ds, 16), TorchDL(ds, 16)), nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
        learn.remove_cb(ProgressCallback)
        return learn
    learn,ref = torch_learner().to_xla(),torch_learner()
    with learn.no_logging(), ref.no_logging():
        for o in (learn, ref): o.fit(2)
        assert not on_xla(learn.detach_xla())
        same(learn, ref, 1e-4)
        assert np.allclose(learn.final_record, ref.final_record, atol=1e-5)
        for o in (learn, ref): o.fit(1)
    same(learn, ref, 1e-4)
    ''')

def test_writing_on_all_cores(run):
    "Callbacks that save, on all cores at once or on the master core alone, while the others go on (cases 07, 38)"
    run('''
    from common import *
    from fastai_xla_extensions.all import *
    emulate_cores(4)

    def learner(bs, **kwargs):
        learn = get_learner(loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=.9), **kwargs)
        for dl in learn.dls.loaders: dl.bs = bs
        return learn
    for i in range(4):
        spoil = [ParamScheduler({'lr': lambda p: .05 if p < .5 else 50.})] if i%2 else []   # with it an epoch in the middle is the best one, without it the last
        ref = fit(learner(32), 4, cbs=[*spoil, SaveModelCallback(fname='ref')])
        for name in ('cbs', 'master_cbs'):
            learn,save = learner(8),SaveModelCallback(fname=f'{name}{i}')
            learn.dls.train.rng.seed(0)
            cbs = dict(cbs=[*spoil, save]) if name == 'cbs' else dict(cbs=spoil, master_cbs=save)
            with learn.no_logging(): learn.xla_fit(4, **cbs)
            assert far(weights(learn), weights(ref)) < 1e-5
            assert np.allclose(learn.recorder.values, ref.recorder.values, rtol=1e-3, atol=1e-3)
            assert str(save.last_saved_path) == f'models/{name}{i}.pth' and abs(save.best - min(o[1] for o in ref.recorder.values)) < 1e-4
            no_xla(save.last_saved_path)
            assert far(weights(get_learner().load(f'{name}{i}', with_opt=False)), weights(ref)) < 1e-5
    assert {o.name for o in Path('models').ls()} == {'ref.pth'} | {f'{o}{i}.pth' for o in ('cbs', 'master_cbs') for i in range(4)}
    ''')

def test_loader_threads_leave_the_device_alone(run):
    "A tensor that another thread moves to the device gets into the graph that is being cut: another program, on this core alone"
    run('''
    import threading
    from common import *
    from fastai_xla_extensions.all import *

    moves = []
    class Scale(DisplayedTransform):
        parameters,order = 't',99
        def __init__(self): super().__init__(); self.t = torch.ones(1)
        def encodes(self, x:TensorImage): return x*self.t
        def __setattr__(self, k, v):
            if k == 't': moves.append((v.device.type, threading.current_thread() is threading.main_thread()))
            super().__setattr__(k, v)
    learn = get_learner()
    for dl in learn.dls.loaders: dl.after_batch.add(Scale())
    learn.to_xla()
    fit(learn, 2)
    assert ('xla', True) in moves and ('xla', False) not in moves, moves
    ''')
