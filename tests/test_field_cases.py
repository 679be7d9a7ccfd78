"What users of other libraries have met, and every verb by both ways to start the cores; the numbers of cases are those of the survey"
import json, time
from textwrap import dedent, indent
import pytest
from helpers import run_code
from test_fit import START
from test_loaders import SETUP
from test_progress import notebook
from test_verbs import END, TOOLS, run

VERBS = '''
training = [('fit', (2, .05), dict(wd=.1)), ('fit_one_cycle', (2, slice(1e-3, .1)), dict(pct_start=.4)), ('fit_flat_cos', (2, .1), {}), ('fit_sgdr', (2, 1), dict(lr_max=.1)), ('fine_tune', (1,), dict(base_lr=.05))]
def train(cores, start_method, verb, args, kw, refs={}):
    l = learner(16//cores)
    with l.no_logging(): getattr(l, f'xla_{verb}')(*args, **kw, num_cores=cores, start_method=start_method)
    if verb not in refs:
        refs[verb] = learner(16)
        with refs[verb].no_logging(): getattr(refs[verb], verb)(*args, **kw)
    equal(l, refs[verb])
    assert not runtime_started() and not multiprocessing.active_children()
    return l
def flat(o): return torch.cat([p.detach().flatten() for p in o.model.parameters()])
class Shift(Transform):
    split_idx = 0
    def encodes(self, x:TensorImage): return x+.25
def imgs(bs):
    dsets = Datasets(range(61), [[lambda i: TensorImage(X[i].view(1,1,6))], [lambda i: TensorCategory(Y[i])]], splits=[list(range(40)), list(range(40,61))])
    set_seed(7)
    l = Learner(dsets.dataloaders(bs=bs, after_item=[Shift()], num_workers=0, device='cpu', drop_last=False), nn.Sequential(nn.Flatten(), nn.Linear(6,2)), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy)
    l.remove_cb(ProgressCallback); l.dls.train.rng.seed(1)
    return l
def infer(cores, start_method):
    l,r = imgs(16//cores),imgs(16)
    opts = dict(num_cores=cores, start_method=start_method)
    with l.no_logging(), r.no_logging():
        for ds_idx in (0, 1): [test_close(a, b, 1e-5) for a,b in zip(l.xla_get_preds(ds_idx, with_loss=True, **opts), r.get_preds(ds_idx, with_loss=True), strict=True)]
        test_close(l.xla_validate(**opts), r.validate(), 1e-5)
        [test_close(a, b, 1e-5) for a,b in zip(l.xla_tta(n=2, **opts), r.tta(n=2), strict=True)]
        kw = dict(num_it=12, show_plot=False, suggest_funcs=(valley, steep))
        test_close(l.xla_lr_find(**kw, **opts), r.lr_find(**kw), 1e-6)
    assert not runtime_started() and not multiprocessing.active_children()
'''

@pytest.mark.parametrize('verbs', ['training', 'inference'])
def test_start_methods(verbs):
    "All nine verbs: the same by forked and by spawned cores, on four and on one, and as in fastai"
    code = SETUP.replace('N;', '4;', 1) + TOOLS + VERBS + ('''
for verb,args,kw in training:
    forked,spawned = [flat(train(4, o, verb, args, kw)) for o in ('fork', 'spawn')]
    assert torch.equal(forked, spawned), (verb, (forked-spawned).abs().max())
    train(1, 'fork', verb, args, kw)
train(1, 'spawn', *training[0])
''' if verbs == 'training' else '''
infer(4, 'fork'); infer(1, 'fork'); infer(2, 'spawn')
''') + END
    # a spawned core imports the script
    assert run_code("if __name__ == '__main__':\n" + indent(code, '    '), timeout=230).rstrip().endswith('finished')

def test_finder():
    """Case 04: the finder stops at the same step on all cores, whatever their losses; it gives fastai's suggestions and plot, and leaves no trace.
    Case 71: after the CPU has trained and searched"""
    run('''
import matplotlib; matplotlib.use('agg')
import matplotlib.pyplot as plt
def plot():
    "Everything that is drawn"
    ax = plt.gca()
    res = [l.get_xydata() for l in ax.lines] + [c.get_offsets() for c in ax.collections],[t.get_text() for t in ax.get_legend().get_texts()] if ax.get_legend() else [],(ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel())
    plt.close('all')
    return res
def state(o): return pickle.dumps((to_np(params_of(o)), o.opt and [{k: (v.tolist() if isinstance(v, Tensor) else v) for k,v in o.opt.state[p].items()} for p in o.model.parameters()], o.opt and o.opt.hypers,
                                   [getattr(o.recorder, k) for k in ('lrs', 'losses', 'values', 'iters')], o.final_record if o.opt else None, o.model.training, o.dls.train.rng.getstate(), [id(c) for c in o.cbs], sorted(vars(o))))
def params_of(o): return torch.cat([p.detach().flatten() for p in o.model.parameters()])
import pickle
trained = lambda bs: learner(bs, 70)   # ragged: 5 steps of 16
def both_find(l, r, **kw):
    before,files = state(l) if hasattr(l, 'final_record') else None,sorted(map(str, Path('.').rglob('*')))
    keep = torch.get_rng_state(),np.random.get_state()[1].tolist()
    with l.no_logging(), r.no_logging():
        a = l.xla_lr_find(**kw); pa = plot() if kw.get('show_plot', True) else None
        after = state(l) if before else None
        assert sorted(map(str, Path('.').rglob('*'))) == files, 'files are left'
        assert before == after and (l.opt is None) == (before is None), 'the learner has changed'
        rng = r.dls.train.rng.getstate(); b = r.lr_find(**kw); r.dls.train.rng.setstate(rng); pb = plot() if kw.get('show_plot', True) else None
    test_eq(type(a).__name__, type(b).__name__)
    if a is not None: test_eq(a._fields, b._fields); test_close(a, b, 1e-6)
    if pa:
        test_eq(pa[1:], pb[1:]); test_eq(len(pa[0]), len(pb[0]))
        for u,v in zip(pa[0], pb[0]): test_eq(u.shape, v.shape); test_close(u[:,0], v[:,0], 1e-9); assert len(u) == 0 or np.allclose(u[:,1], v[:,1], rtol=1e-4, atol=1e-5), abs(u-v).max()
    return a,pa
# on the CPU first, with its own finder; then a fit on the cores
l,r = trained(4),trained(16)
for o in (l, r): o.recorder.before_fit()
both_find(l, r, num_it=10)
with l.no_logging(), r.no_logging(): l.dls.train.bs = 16; [(o.lr_find(num_it=8, show_plot=False), o.fit(1)) for o in (l, r)]; l.dls.train.bs = 4; l.xla_fit(2); r.fit(2)
equal(l, r)
threads = torch.autograd.is_multithreading_enabled()
# shorter than an epoch, whole epochs, and in the middle of one; with and without a stop; from high rates; per group; without suggestions
for kw in (dict(num_it=6), dict(num_it=20), dict(num_it=34, suggest_funcs=(valley, slide, minimum, steep)), dict(num_it=30, stop_div=False, end_lr=1e-2), dict(start_lr=1e-6, end_lr=1e5, num_it=60), dict(num_it=12, suggest_funcs=None)):
    _,p = both_find(l, r, **kw)
    assert len(p[0][0]) > 0 or kw['num_it'] == 6
with l.no_logging(), r.no_logging(): l.xla_fit(1); r.fit(1)
equal(l, r)
test_eq(torch.autograd.is_multithreading_enabled(), threads)

# targets that grow with the item's place in the step, so that the cores' losses are far apart; the stop is somewhere, and the same one
set_seed(2); xs = torch.randn(64, 2); ys = xs.sum(1, keepdim=True) + (10.**(torch.arange(64)%4))[:,None]
def grows(bs):
    set_seed(1)
    l = Learner(DataLoaders(DataLoader(list(zip(xs, ys)), bs=bs), DataLoader(list(zip(xs, ys)), bs=bs), device='cpu'), nn.Linear(2,1), loss_func=MSELossFlat(), opt_func=SGD)
    l.remove_cb(ProgressCallback); return l
for i in range(10):
    kw = dict(start_lr=1e-6, end_lr=1e2, num_it=80+i, show_plot=False)
    l,r = grows(4),grows(16)
    with l.no_logging(), r.no_logging(): a,b = l.xla_lr_find(**kw, suggest_funcs=(valley, minimum)),r.lr_find(**kw, suggest_funcs=(valley, minimum))
    test_close(a, b, 1e-6); assert 20 < len(r.recorder.lrs) < 80, 'it is to stop early'
assert not Path('models').exists() or not list(Path('models').glob('tmp*'))
''')
