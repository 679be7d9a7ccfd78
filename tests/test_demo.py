"The demo does what the README says that it does"
import os,re,sys
import pytest
from helpers import ROOT,run_code,run_fresh

def _shape(text): return [re.sub(r'[\d.]+(e-\d+)?', '0', o).rstrip() for o in text.strip().splitlines()]

def test_demo(tmp_path):
    out = run_fresh([sys.executable, ROOT/'examples/demo.py'], env={'PYTHONPATH': ROOT}, cwd=tmp_path)
    out = out[out.index('8 cores x'):]   # after what torch_xla may say at its start
    said = re.search(r'^```text\n(8 cores x.*?)^```', (ROOT/'README.md').read_text(encoding='utf-8'), re.MULTILINE | re.DOTALL)[1]
    lines = [o for o in out.strip().splitlines() if not o.startswith('WARNING')]
    assert [re.sub(' +', ' ', o) for o in _shape('\n'.join(lines))] == [re.sub(' +', ' ', o) for o in _shape(said)]
    accs = [float(o) for o in re.findall(r'^\d cores? +([\d.]+)', out, re.MULTILINE)]
    assert len(accs) == 2 and min(accs) >= .95
    assert not os.listdir(tmp_path)

@pytest.mark.parametrize('change', ['', 'demo.accuracy,get = (lambda p,t: tensor(1.)),demo.get_learner; demo.get_learner = lambda bs: get(min(bs, 32))'])
def test_demo_fails(change):
    "Its exit code is 1 if an accuracy is too low, and if it is not but the weights differ"
    with pytest.raises(AssertionError, match='(?s)exit code 1.*8 cores +' + ('1[.]0000' if change else '0[.][0-8]')): run_code(f'''
    import importlib.util,sys
    spec = importlib.util.spec_from_file_location('demo', {str(ROOT/'examples/demo.py')!r})
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    from fastai.basics import tensor
    demo.n_epoch = 1
    {change}
    sys.exit(demo.main())
    ''')
