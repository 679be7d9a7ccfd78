"Files of a learner in SPMD mode: ordinary ones that load anywhere, and sharded checkpoints that load onto any mesh"
import pytest
from helpers import ROOT,run_code

common = r'''
import json,os,pickletools,shutil,sys,threading,warnings,zipfile
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
    return lambda code, cores=8: run_code(code, env={'PYTHONPATH': f"{ROOT}:{tmp_path/'lib'}", 'FASTAI_XLA_CORES': cores}, cwd=tmp_path/'cwd')

@pytest.fixture(scope='module')
def saved(run):
    "What a learner on a (4,2) mesh writes, and what plain fastai on the CPU makes of the same"
    print(run('''
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

        for load in (learn.load, learn.load_sharded):
            fit(learn, 7)
            n = met.metric_data('CompileTime')[0]
            assert load(kind) is learn
            equal(record(learn), torch.load(f'{kind}.pt', weights_only=False))
            assert specs(learn) == split, (specs(learn), split)
            fit(learn, 2)
            close(learn, refs[kind])
            print(kind, load.__name__, 'compilations', met.metric_data('CompileTime')[0]-n)
        torch.save(learn.get_preds()[0], f'{kind}_preds.pt')
        learn.export(f'{kind}.pkl')
    '''))
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
        if kind == 'adam': learn.freeze()
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
        for file in (True, False):
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
