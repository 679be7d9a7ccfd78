"Files of a learner in SPMD mode: ordinary ones that load anywhere, and sharded checkpoints that load onto any mesh"
import pytest
from helpers import ROOT,run_code

common = r'''
import os,pickletools,shutil,sys,threading,time,warnings,zipfile
from math import prod
from fastai.vision.all import *
from sklearn.datasets import load_digits

xs,ys = map(tensor, load_digits(return_X_y=True))
xs,ys = (xs[:300]/16).float(),ys[:300].long()
def get_x(i): return xs[i]
def get_y(i): return ys[i]

class Tied(nn.Module):
    "Two layers share a matrix; a buffer, normalized layers, groups of parameters"
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,64,bias=False), nn.BatchNorm1d(64))
        self.body[2].weight = self.body[0].weight
        self.head = nn.Linear(64,16), nn.Linear(16,10)
        self.head = nn.Sequential(*self.head)
    def forward(self, x): return self.head(self.body(x))
def halves(m): return [list(m.body.parameters()), list(m.head.parameters())]

def learner(opt_func=Adam, seed=42, model=Tied, splitter=halves, **kwargs):
    "Its data are always the same, and so are its weights for the same seed"
    set_seed(seed)
    dls = Datasets(range(300), [[get_x], [get_y]], splits=[range(200), range(200,300)]).dataloaders(bs=40, val_bs=50, num_workers=0, device=torch.device('cpu'))
    learn = Learner(dls, model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=.01, opt_func=opt_func, splitter=splitter, **kwargs)
    learn.remove_cb(ProgressCallback)
    return learn
adamw = partial(OptimWrapper, opt=torch.optim.AdamW, weight_decay=.02, eps=1e-4)   # with its own 1e-8, noise of gradients near 0 becomes steps
kinds = dict(adam=Adam, adamw=adamw, ranger=ranger)

def fit(learn, seed, n=1, **kwargs):
    "Epochs in an order that depends on `seed` alone"
    learn.dls.train.rng.seed(seed)
    with learn.no_logging(): learn.fit(n, **kwargs)
    return learn

def base(opt):
    while hasattr(opt, 'opt'): opt = opt.opt
    return opt
def opt_state(learn):
    "Everything that the optimizer keeps, by parameter and key"
    state,ps = base(learn.opt).state,[p for ps in learn.opt.param_lists for p in ps]
    res = {(i,k): v.detach().cpu() if isinstance(v, Tensor) else v for i,p in enumerate(ps) for k,v in state[p].items()}
    slow = getattr(learn.opt, 'slow_weights', None)
    return {**res, **{('slow',i): t.cpu() for i,t in enumerate(slow.concat() if slow else [])}, 'count': getattr(learn.opt, 'count', None)}
def record(learn):
    "The whole state of a learner, on the CPU"
    return dict(model={k: v.cpu() for k,v in learn.model.state_dict().items()}, opt=opt_state(learn), hypers=[dict(h) for h in learn.opt.hypers], frozen_idx=learn.opt.frozen_idx)
def equal(a, b):
    "Bit by bit"
    if isinstance(a, Tensor): assert type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b), (a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for k in a: equal(a[k], b[k])
    elif isinstance(a, (list,tuple)):
        assert len(a) == len(b)
        for o in zip(a, b): equal(*o)
    else: assert a == b and type(a) is type(b), (a, b)
def close(learn, weights, eps=1e-4):
    "As a run that was never interrupted: `weights` of plain fastai on the CPU"
    w = torch.cat([v.flatten() for v in record(learn)['model'].values() if v.dtype == torch.float32])
    ref = torch.cat([v.flatten() for v in weights.values() if v.dtype == torch.float32])
    far = ((w-ref).norm()/ref.norm()).item()
    assert far < eps, far

def specs(learn):
    "How parameters and the optimizer's tensors are split, as XLA says it"
    C = sys.modules['torch_xla']._XLAC
    state = base(learn.opt).state
    return {n: [C._get_xla_sharding_spec(t) or '{replicated}' for t in [p, *[v for _,v in sorted(state[p].items()) if isinstance(v, Tensor) and v.ndim]]] for n,p in learn.model.named_parameters()}
def fails(err, text, f, *args, **kwargs):
    try: f(*args, **kwargs)
    except err as e: assert text in str(e), (text, str(e))
    else: assert False, f'no error: {text}'
    return True
'''

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "Run code that sees `common`, each time in a fresh process of 8 cores, always in the same directory"
    tmp_path = tmp_path_factory.mktemp('spmd_files')
    (tmp_path/'lib').mkdir(); (tmp_path/'cwd').mkdir()
    (tmp_path/'lib'/'common.py').write_text(common, encoding='utf-8')
    def _run(code): return run_code(code, env={'PYTHONPATH': f"{ROOT}:{tmp_path/'lib'}", 'FASTAI_XLA_CORES': 8}, cwd=_run.cwd)
    _run.cwd = tmp_path/'cwd'
    return _run

@pytest.fixture(scope='module')
def saved(run):
    "What a learner on a (4,2) mesh writes, and what plain fastai on the CPU makes of the same"
    run('''
    from common import *
    from fastai_xla_extensions.all import *
    import fastai_xla_extensions.spmd
    import torch_xla.debug.metrics as met

    refs = {}
    for kind,f in kinds.items():
        ref = learner(f)
        if kind == 'adam': ref.freeze()
        fit(ref, 1)
        refs[kind] = fit(ref, 2).model.state_dict()
    torch.save(refs, 'refs.pt')

    for kind,f in kinds.items():
        learn = learner(f).to_spmd((4,2))
        if kind == 'adam': learn.freeze()
        fit(learn, 1, cbs=SaveModelCallback(fname=f'best_{kind}', every_epoch=False))
        split = specs(learn)
        assert sum('devices=' in o for os in split.values() for o in os) >= (4 if kind == 'adam' else 6), split
        torch.save(record(learn), f'{kind}.pt')
        assert learn.save(kind) == Path(f'models/{kind}.pth')
        learn.save(f'{kind}_weights', with_opt=False)
        assert learn.save_sharded(kind) == Path(f'models/{kind}')
        fit(learn, 2)
        close(learn, refs[kind])   # writing files changes nothing

        compiled = lambda: met.metric_data('CompileTime')[0]
        for load in (learn.load, learn.load_sharded):
            fit(learn, 7)
            n = compiled()
            assert load(kind) is learn
            assert compiled() <= n+1   # the first time: what the file has is copied into the parameters, in one program
            assert specs(learn) == split, (specs(learn), split)
            n = compiled()
            fit(learn, 2)
            assert compiled() == n, compiled() - n
            close(learn, refs[kind])
            load(kind)
            equal(record(learn), torch.load(f'{kind}.pt', weights_only=False))
            assert specs(learn) == split
            fit(learn, 2)
        torch.save(learn.get_preds()[0], f'{kind}_preds.pt')
        learn.export(f'{kind}.pkl')
    ''')
    return run

def test_case_33(saved):
    "Case 33: a file that is written on a mesh holds whole tensors under the model's own names, and needs no torch_xla to be read"
    saved('''
    import sys
    sys.modules.update(torch_xla=None, fastai_xla_extensions=None)   # importing them fails
    from common import *

    refs = torch.load('refs.pt')
    for kind,f in kinds.items():
        rec,plain = torch.load(f'{kind}.pt', weights_only=False),learner(f).model.state_dict()
        for name in (kind, f'{kind}_weights', f'best_{kind}'):
            with zipfile.ZipFile(f'models/{name}.pth') as z: data = z.read(first(z.namelist(), lambda o: o.endswith('/data.pkl')))
            assert not [o for _,o,_ in pickletools.genops(data) if isinstance(o, str) and 'xla' in o.lower()]
            state = torch.load(f'models/{name}.pth', weights_only=False)
            if name == kind:
                assert state.keys() == {'model', 'opt'}
                state = state['model']
            assert list(state) == list(plain)
            for k,v in plain.items():
                o = state[k]
                assert type(o) is Tensor and o.device.type == 'cpu' and o.shape == v.shape and o.dtype == v.dtype and o.untyped_storage().nbytes() == v.numel()*v.element_size(), k
            equal(dict(state), rec['model'])
        learn = learner(f, seed=1).load(kind)
        equal(record(learn) | {'frozen_idx': rec['frozen_idx']}, rec)
        learn.opt.freeze_to(rec['frozen_idx'])
        close(fit(learn, 2), refs[kind])
        learn = load_learner(f'{kind}.pkl')
        assert type(learn) is Learner and {p.device.type for p in learn.model.parameters()} == {'cpu'}
        learn.remove_cb(ProgressCallback)
        preds = learn.get_preds(dl=learner().dls.valid)[0]
        assert (preds - torch.load(f'{kind}_preds.pt')).abs().max() < 1e-5
    ''')

@pytest.mark.parametrize('mesh', ['(2,4)', '(1,8)', '(8,1)'])
def test_other_meshes(saved, mesh):
    "Files and checkpoints of a (4,2) mesh, on another one in another process: bit by bit, and the fit goes on"
    saved(f'''
    from common import *
    from fastai_xla_extensions.all import *
    import fastai_xla_extensions.spmd

    refs = torch.load('refs.pt')
    for kind,f in kinds.items():
        rec = torch.load(f'{{kind}}.pt', weights_only=False)
        for file in ([True, False] if kind == 'adam' else [False]):
            learn = learner(f, seed=1).to_spmd({mesh})
            learn.create_opt()
            if file: learn.load(kind); learn.opt.freeze_to(rec['frozen_idx'])
            else: assert learn.load_sharded(kind) is learn
            equal(record(learn), rec)
            split = specs(learn)
            assert all(len(set(o)) == 1 for o in split.values()), split   # the optimizer's tensors as their parameters
            assert any('devices=' in o[0] for o in split.values()) == ({mesh} != (8,1)), split
            assert [p.requires_grad for p in learn.model.body.parameters()] == [kind != 'adam']*2 + [True]*2   # frozen, with its BatchNorm trained
            close(fit(learn, 2), refs[kind])
        assert specs(learn) == split
    ''')

def test_to_xla_and_cpu(saved):
    "Files and checkpoints of a mesh, on one core and on the CPU, in a process that isn't in SPMD mode"
    saved('''
    from common import *
    from fastai_xla_extensions.all import *
    from fastai_xla_extensions.core import is_spmd

    refs = torch.load('refs.pt')
    for kind,f in kinds.items():
        rec = torch.load(f'{kind}.pt', weights_only=False)
        learn = learner(f, seed=1).load_sharded(kind)   # 'torch_xla' is not needed for that
        assert type(learn) is Learner and (kind != 'adam' or 'torch_xla' not in sys.modules)
        equal(record(learn), rec)
        close(fit(learn, 2), refs[kind])
        for file in ([True, False] if kind == 'adamw' else [False]):
            learn = learner(f, seed=1).to_xla()
            learn.load(kind) if file else learn.load_sharded(kind)
            assert {t.device.type for t in learn.model.parameters()} == {'xla'}
            close(fit(learn, 2), refs[kind])
        fails(RuntimeError, 'use `learn.save`', learn.save_sharded, 'x')
        fails(RuntimeError, 'use `learn.save`', learn.detach_xla().save_sharded, 'x')
    assert not is_spmd() and not Path('models/x').exists()
    ''')

def test_sharded_checkpoints(saved):
    "In the background, in steps, all or nothing; each fault has its message; nothing is left open"
    saved('''
    from common import *
    from fastai_xla_extensions.all import *
    import fastai_xla_extensions.checkpoint as ck, fastai_xla_extensions.spmd
    import torch.distributed as dist, torch.distributed.checkpoint as dist_cp

    def sockets(): return sorted(os.readlink(f'/proc/self/fd/{o}') for o in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{o}') and 'socket' in os.readlink(f'/proc/self/fd/{o}'))
    def names(d='models'): return sorted(o.name for o in Path(d).iterdir())
    def environ(): return {k: v for k,v in os.environ.items() if k != 'SKIP_MEGASCALE_PJRT_CLIENT'}   # torch_xla sets it for a moment and may leave it, where two threads do so
    def threads(): return {o.name for o in threading.enumerate()}
    learn = fit(learner().to_spmd((4,2)), 1)
    learn.save_sharded('first')
    sds,env,ths = sockets(),environ(),threads()

    # each core's part is in the folder once: no more bytes than the whole
    size = sum(t.numel()*t.element_size() for t in [*learn.model.state_dict().values(), *[v for s in base(learn.opt).state.values() for v in s.values() if isinstance(v, Tensor)]])
    md = dist_cp.FileSystemReader('models/first').read_metadata()
    assert sum(prod(c.sizes)*v.properties.dtype.itemsize for v in md.state_dict_metadata.values() if hasattr(v, 'chunks') for c in v.chunks) == size
    assert len(md.state_dict_metadata['model.head.0.weight'].chunks) == 2 == len(md.state_dict_metadata['opt.head.0.weight.grad_avg'].chunks)

    # what is written in the background is the state at the call, whatever comes after it
    rec = record(learn)
    go,planner = threading.Event(),ck._save_planner
    class Slow(type(planner())):
        def set_up_planner(self, *args):
            assert go.wait(60)
            super().set_up_planner(*args)
    ck._save_planner = Slow
    f = learn.save_sharded('run', step=1, wait=False)
    fit(learn, 3)
    assert not f.done() and not Path('models/run').exists()
    ck._save_planner = planner
    go.set()
    assert f.result() == Path('models/run/1') and f.done()
    equal(record(learn.load_sharded('run')), rec)
    fit(learn, 3)
    rec2 = record(learn)
    fs = [learn.save_sharded('run', step=i, keep=2, wait=False) for i in (2,3)]
    learn.load_sharded('run', step=3)   # waits
    assert all(o.done() for o in fs) and names('models/run') == ['2', '3']
    learn.save_sharded('run', step=1, keep=2)   # another fit in the same folder: the newest one stays
    assert names('models/run') == ['1', '3']
    fit(learn, 4)
    equal(record(learn.load_sharded('run')), rec2)   # the highest
    learn.save_sharded('run', step=10)
    fit(learn, 4, n=5, cbs=ck.SaveShardsCallback('cb', every=2, keep=1))
    assert names('models/cb') == ['4'] and names('models/run') == ['1', '10', '3'] and not ck._saving

    # torch_xla's own manager reads the steps
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager
    manager = CheckpointManager('models/run', 1, chkpt_on_preemption=False)
    assert manager.all_steps() == [1, 3, 10]
    state = {f'model.{k}': v for k,v in learn.model.state_dict().items()}
    manager.restore(3, state)
    equal({k[6:]: v.cpu() for k,v in state.items()}, rec2['model'])
    learn.save_sharded('grouped')   # it isn't used, if there is one
    dist.destroy_process_group()
    del manager

    # the model alone
    learn.save_sharded('weights', with_opt=False)
    new = learner(seed=3).to_spmd((4,2))
    new.create_opt()
    with warnings.catch_warnings(record=True) as w: new.load_sharded('weights')
    assert any("doesn't contain an optimizer state" in str(o.message) for o in w)
    equal(record(new)['model'], record(learn)['model'])
    new.load_sharded('first', with_opt=False)
    equal(record(new)['model'], rec['model'])

    # a save that isn't whole is no save: torch_xla's own planner leaves out what several cores have
    rec = record(learn.load_sharded('first'))
    fit(learn, 5)
    import torch_xla.experimental.distributed_checkpoint as xc
    mine = names()
    ck._save_planner = xc.SPMDSavePlanner
    fails(RuntimeError, 'Missing: model.body.0.weight, model.body.2.weight, model.head.0.weight, opt.', learn.save_sharded, 'first')
    class Loses(type(planner())):
        def create_local_plan(self):
            plan = super().create_local_plan()
            plan.items[:] = [o for o in plan.items if (o.index.fqn, o.index.offset) not in self.lost]
            return plan
    ck._save_planner = Loses
    for fqn,offset in (('model.head.1.bias', (0,)), ('opt.head.0.weight.sqr_avg', (0,32))):   # a whole tensor, and a part of one
        Loses.lost = [(fqn, torch.Size(offset))]
        fails(RuntimeError, f'Missing: {fqn}', learn.save_sharded, 'first')
        fails(RuntimeError, f'Missing: {fqn}', learn.save_sharded, 'new')
    with warnings.catch_warnings(record=True) as w:
        f = learn.save_sharded('first', wait=False)
        fails(RuntimeError, f'Missing: {fqn}', f.result)
        f = learn.save_sharded('first', wait=False)
        while not f.done(): time.sleep(.01)
        time.sleep(.1)
    assert f'Missing: {fqn}' in str(w[-1].message), w
    ck._save_planner = planner
    fails(RuntimeError, f'Missing: {fqn}', learn.save_sharded, 'first')   # of the one before, which nobody has looked at
    assert names() == mine
    equal(record(learn.load_sharded('first')), rec)

    # a save that is stopped between its two renames
    Path('models/first').rename('models/.first.old')
    equal(record(learn.load_sharded('first')), rec)
    Path('models/first').rename('models/.first.old')
    learn.save_sharded('first')
    assert names() == mine

    # what doesn't fit, and what isn't a checkpoint; the learner stays as it is
    here = record(fit(learn, 6))
    def no(err, text, *args, l=learn, **kwargs): fails(err, text, l.load_sharded, *args, **kwargs)
    Path('models/empty').mkdir(); Path('models/empty/notes').write_text('mine')
    Path('models/a_file').write_text('mine')
    dist_cp.save({'x': torch.ones(3)}, checkpoint_id='models/foreign')
    def copy(name, data=None, **files):
        shutil.copytree('models/first', f'models/{name}')
        return Path(f'models/{name}')
    (copy('cut')/'__0_0.distcp').write_bytes(Path('models/first/__0_0.distcp').read_bytes()[:-1000])
    (copy('gone')/'__0_0.distcp').unlink()
    (copy('bad')/'.metadata').write_bytes(b'mine')
    (copy('no_md')/'.metadata').unlink()
    no(FileNotFoundError, 'no sharded checkpoint models/nothing', 'nothing')
    no(FileNotFoundError, 'Steps in models/run: 1, 3, 10', 'run', step=7)
    for o in ('empty', 'no_md'): no(ValueError, 'has no .metadata', o)
    no(ValueError, 'it is a file', 'a_file')
    no(ValueError, 'was not written by `save_sharded`', 'foreign')
    for o in ('cut', 'gone'): no(ValueError, '__0_0.distcp is missing or too short', o)
    no(ValueError, "damaged: its .metadata can't be read", 'bad')
    no(ValueError, '://', 'gs://bucket/x')
    equal(record(learn), here)
    def other(f=Adam, **kwargs):
        new = fit(learner(f, **kwargs).to_spmd((4,2)), 1)
        return new,record(new)
    class Wide(Tied):
        def __init__(self): super().__init__(); self.head = nn.Sequential(nn.Linear(64,32), nn.Linear(32,10)); self.extra = nn.Linear(2,2)
    for l,text in [(other(model=Wide), 'head.0.weight is (16, 64) there and (32, 64) here'), (other(model=Wide), 'extra.weight is only here'),
                   (other(adamw), 'it is of Optimizer, and this one is AdamW'), (other(ranger), 'Lookahead'), (other(splitter=trainable_params), '2 groups of parameters, and this one has 1')]:
        no(ValueError, text, 'first', l=l[0])
        equal(record(l[0]), l[1])

    # and nothing of somebody else is overwritten
    for o in ('empty', 'a_file'): fails(FileExistsError, 'not a sharded checkpoint', learn.save_sharded, o)
    fails(FileExistsError, 'without steps', learn.save_sharded, 'first', step=1)
    fails(FileExistsError, 'not a sharded checkpoint', learn.save_sharded, 'run')
    for kw in (dict(step=-1), dict(step='1'), dict(keep=2), dict(step=1, keep=0)): fails(ValueError, 'step' if kw.get('keep') != 0 else 'keep', learn.save_sharded, 'y', **kw)
    fails(ValueError, '://', learn.save_sharded, 'gs://bucket/x')
    assert Path('models/empty/notes').read_text() == 'mine' and not Path('models/y').exists() and not Path('gs:').exists()

    assert set(sockets()) <= set(sds) and not dist.is_initialized() and threads() <= ths, (sockets(), sds, threads(), ths)
    assert environ() == env, environ().items() ^ env.items()
    assert not [o for o in warnings.filters if 'TypedStorage' in str(o) or 'non-tuple' in str(o)]

    # killed while it writes
    class Dies(type(planner())):
        n = 0
        def resolve_data(self, item):
            self.n += 1
            if self.n > 5: os._exit(0)
            return super().resolve_data(item)
    ck._save_planner = Dies
    fit(learn, 7)
    learn.save_sharded('run', step=11)
    assert False
    ''')
    saved('''
    from common import *
    from fastai_xla_extensions.all import *
    import fastai_xla_extensions.spmd
    assert sorted(o.name for o in Path('models/run').iterdir()) == ['.11.part', '1', '10', '3']
    learn = learner().to_spmd((2,4))
    learn.load_sharded('run')
    fails(FileNotFoundError, 'Steps in models/run: 1, 3, 10', learn.load_sharded, 'run', step=11)
    learn.save_sharded('run', step=12, keep=2)
    assert sorted(o.name for o in Path('models/run').iterdir()) == ['10', '12']
    learn.save_sharded('last', wait=False)   # Python waits for it at its end
    ''')
    assert (saved.cwd/'models'/'last'/'.metadata').exists() and not list((saved.cwd/'models').glob('.*'))
