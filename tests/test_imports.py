"Modules depend on each other in one direction, importing them is free of XLA, and what is missing or doesn't match is named"
import ast
import pytest
from helpers import ROOT,run_code

pytestmark = pytest.mark.quick

LIB = 'fastai_xla_extensions'
MODULES = {o.stem: ast.parse(o.read_text(encoding='utf-8')) for o in (ROOT/LIB).glob('*.py') if o.stem not in ('__init__', '_modidx')}

# What each module may import; what that imports it may import as well
ORDER = dict(core='', debug='core', optimizer='core', layers='core', data='core', metrics='debug optimizer layers data', callback='metrics',
             launch='core', learner='callback launch', inference='learner', spmd='callback', augment='core', checkpoint='optimizer', plan='debug',
             all='inference spmd augment checkpoint plan')

def _below(name):
    "All that `name` may import"
    return {o for d in ORDER[name].split() for o in {d, *_below(d)}}

def _siblings(tree):
    "Modules of this package that `tree` imports, at its top or in a function"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): names = [o.name for o in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f'{LIB}.' * (node.level > 0) + (node.module or '')
            names = [base] if node.module and base != LIB else [f'{LIB}.{o.name}' for o in node.names]
        else: continue
        yield from (o.split('.')[1] for o in names if o.startswith(f'{LIB}.'))

def test_one_direction():
    assert {'core', 'launch', 'callback', 'learner'} <= set(MODULES)
    assert 'core' in _siblings(MODULES['launch']) and 'callback' in _siblings(MODULES['learner'])   # both ways to write it are seen
    assert 'launch' not in _below('spmd') and 'data' in _below('callback')
    bad = [f'{name} imports {o}' for name,tree in MODULES.items() for o in _siblings(tree) if o not in _below(name)]
    assert not bad, bad

def test_no_wildcards():
    bad = [f'{name}: line {node.lineno}' for name,tree in MODULES.items() for node in ast.walk(tree)
           if isinstance(node, ast.ImportFrom) and any(o.name == '*' for o in node.names)]
    assert not bad, bad

def test_import_is_free():
    "Importing everything neither imports torch_xla or accelerate nor changes the environment; all that is public is documented"
    run_code('''
    import os, sys
    import fastai.callback.schedule, fastai.learner   # what fastai itself does is not ours
    before = dict(os.environ)
    from fastai_xla_extensions import all as lib
    assert not {'torch_xla', 'accelerate'} & set(sys.modules) and dict(os.environ) == before
    from fastai_xla_extensions.core import runtime_started
    assert not runtime_started()

    import inspect
    from fastcore.docments import docments
    from fastai.learner import Learner
    verbs = {k: v for k,v in vars(Learner).items() if getattr(v, '__module__', '').startswith('fastai_xla_extensions')}
    assert {'to_xla', 'detach_xla', 'xla_ctx', 'xla_fit', 'xla_fit_one_cycle'} <= set(verbs)
    bad = []
    def check(name, f):
        f = inspect.unwrap(f)
        c = f.__code__
        n = c.co_argcount + c.co_kwonlyargcount
        own = [*c.co_varnames[:n], *(['*args'] if c.co_flags & inspect.CO_VARARGS else [])]   # not those that it delegates to others
        docs = docments(f, args_kwargs=True)
        bad.extend(f'{name}: {o}' for o in own if o != 'self' and not docs.get(o.strip('*')))
    for name in lib.__all__: assert hasattr(lib, name), name
    for name,o in {**{k: getattr(lib, k) for k in lib.__all__}, **verbs}.items():
        if not (o.__doc__ or '').strip(): bad.append(f'{name}: no docstring')
        if not isinstance(o, type): check(name, o)
        elif '__init__' in vars(o): check(name, o.__init__)
    assert not bad, bad
    ''')

def test_missing_and_mismatched(tmp_path):
    "Without torch_xla and accelerate fastai works on; the first use of XLA says what to install, or which versions don't go together"
    for name,code in dict(broken="raise ImportError('undefined symbol: _ZN5torch4lazy')", old="__version__ = '2.6.0'").items():
        (tmp_path/name/'torch_xla').mkdir(parents=True)
        (tmp_path/name/'torch_xla'/'__init__.py').write_text(code)
        (tmp_path/name/'torch_xla-2.6.0.dist-info').mkdir()
        (tmp_path/name/'torch_xla-2.6.0.dist-info'/'METADATA').write_text('Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.6.0\n')
    run_code(f'''
    import importlib, sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split('.')[0] in ('torch_xla', 'accelerate'): raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
    sys.meta_path.insert(0, Blocked())
    import multiprocessing, torch
    from fastai.test_utils import synth_learner
    from fastai_xla_extensions.all import *
    learn = synth_learner()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    uses = [n_cores, learn.to_xla, lambda: learn.xla_fit(1), lambda: learn.xla_fit_one_cycle(1), lambda: learn.xla_ctx().__enter__()]
    install = "pip install 'torch>=2.9,<2.10' 'torch_xla>=2.9,<2.10'"
    def check(cause, *texts):
        for f in uses:
            try: f()
            except ImportError as e: assert all(o in str(e) for o in texts) and cause in repr(e.__cause__), (e, e.__cause__)
            else: assert False, 'no error'
        assert not multiprocessing.active_children()
        with learn.no_bar(), learn.no_logging(): learn.fit(1)   # it is as before
    check("No module named 'torch_xla'", 'torch_xla', 'not installed', install, 'torch_xla[tpu]', torch.__version__)

    sys.meta_path.pop(0)
    def stub(name):
        sys.path.insert(0, f'{tmp_path}/{{name}}')
        sys.modules.pop('torch_xla', None); importlib.invalidate_caches()
    stub('broken')
    check('undefined symbol', '2.6.0', torch.__version__, install)
    stub('old')
    check('None', '2.6.0', torch.__version__, install)
    ''')
