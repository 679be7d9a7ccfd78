"What the caller sees while the cores work: fastai's own bars, table and plots, in a notebook and in a terminal"
import json
from textwrap import dedent
from helpers import run_code
from test_fit import START, run

MAKE = '''
from fastai.callback.progress import *
emulate_cores(2)
class Slow(Callback):
    def before_batch(self): time.sleep(.12)
def make(bs, **kwargs):
    o = learner(bs, cbs=Slow(), **kwargs)
    o.add_cb(ProgressCallback())
    return o
'''

# A client that keeps every message, and reads of what was shown; runs in a process of its own
CLIENT = '''
import json, re, sys
from html.parser import HTMLParser
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
class Client(NotebookClient):
    def process_message(self, msg, cell, i):
        self.messages.setdefault(i, []).append((msg['msg_type'], msg['content']))
        return super().process_message(msg, cell, i)
def execute(cells):
    "Outputs of each cell as they are at the end, and what was shown on the way"
    client = Client(new_notebook(cells=[new_code_cell(o) for o in cells]), timeout=120, kernel_name='python3')
    client.messages = {}
    client.execute()
    return [c.outputs for c in client.nb.cells],[[m['data'] for kind,m in client.messages[i] if kind in ('display_data', 'update_display_data')] for i in range(len(cells))]
def html(datas): return [d['text/html'] if 'text/html' in d else d.get('text/markdown', '') for d in datas]
def bars(datas):
    "(step, steps) of the innermost bar, as it was drawn"
    found = [re.findall(r'<progress max="(\\d+)" value="(\\d+)"', h) for h in html(datas)]
    return [tuple(map(int, reversed(o[-1]))) for o in found if o]
def compiling(datas): return [b for d in datas if 'compiling' in ''.join(html([d])) for b in bars([d])]
class Table(HTMLParser):
    def __init__(self, text): super().__init__(); self.rows = []; self.feed(text)
    def handle_starttag(self, tag, attrs):
        if tag == 'tr': self.rows.append([])
    def handle_data(self, data): self.rows[-1].append(data)
def tables(datas): return [Table(h[h.index('<table class'):h.index('</table>')]).rows for h in html(datas) if '<table class' in h]
def streams(outputs): return [(o['name'], o['text']) for o in outputs if o['output_type'] == 'stream']
def kinds(outputs):
    "What stays under a cell, without the streams and the style sheet that comes once"
    return [(o['output_type'], sorted(o['data'])) for o in outputs if o['output_type'] != 'stream' and '<style>' not in o.get('data', {}).get('text/html', '')]
'''

def notebook(cells, checks, tmp_path, **kwargs):
    __tracebackhide__ = True
    (tmp_path/'cells.json').write_text(json.dumps([dedent(o).strip() for o in cells]))
    res = run_code(CLIENT + f"outs,shown = execute(json.load(open({str(tmp_path/'cells.json')!r})))\n" + dedent(checks) + "print('finished')", env={'IPYTHONDIR':tmp_path, 'MPLCONFIGDIR':tmp_path}, **kwargs)
    assert res.rstrip().endswith('finished'), res

def test_fit_in_a_notebook(tmp_path):
    "The bar moves while the cores train, the table has the recorder's numbers, the picture is there: all as under fastai's own cell"
    notebook([START + MAKE, 'learn,ref = make(16),make(32)\nfor o in (learn, ref): o.add_cb(ShowGraphCallback())',
        'learn.xla_fit(3)', 'ref.fit(3)', 'learn.remove_cb(ShowGraphCallback)', 'learn.xla_fit(2, cbs=ShowGraphCallback)', 'learn.xla_fine_tune(1)',
        'with learn.no_logging(): learn.xla_fit(1)', 'with learn.no_logging(), learn.no_bar(): learn.xla_fit(1)', 'with learn.no_bar(): learn.xla_fit(1, cbs=ShowGraphCallback)', '''
        print(json.dumps([list(learn.recorder.metric_names), [list(map(float, o)) for o in ref.recorder.values]]))
        assert sorted(cb.name for cb in learn.cbs) == ['cast_to_tensor', 'progress', 'recorder', 'slow', 'train_eval'] and learn.logger is print and learn.create_mbar is True
        assert not hasattr(learn.progress, 'mbar')
        untouched()'''.replace('print(json', 'import json\n        print(json')], '''
    line = '2 cores x bs 16 = 32 a step, 10 steps an epoch\\n'
    names,values = json.loads(streams(outs[-1])[0][1])
    FIT,REF,CLASS,TUNE,QUIET,SILENT,NO_BAR = 2,3,5,6,7,8,9
    assert streams(outs[FIT]) == [('stdout', line)], streams(outs[FIT])      # and no word from the cores
    # what stays: the table, and the picture
    assert kinds(outs[FIT]) == kinds(outs[REF]) and [o for _,o in kinds(outs[FIT])][1] == ['image/png', 'text/plain'], (kinds(outs[FIT]), kinds(outs[REF]))
    table = tables([o['data'] for o in outs[FIT] if 'data' in o])
    assert len(table) == 1 and table[0][0] == names == ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'time'], table
    rows = table[0][1:]
    assert [r[0] for r in rows] == ['0','1','2'] and all(re.fullmatch('00:0[0-9]', r[-1]) for r in rows), rows
    assert all(abs(float(a)-b) < 2e-5 for r,v in zip(rows, values) for a,b in zip(r[1:4], v)), (rows, values)
    # what moves: the bars in steps, the table by a row at a time, the picture at the end of each epoch
    b = bars(shown[FIT])
    seen = [i for i,n in b if n == 10]
    resets = [i for i,(x,y) in enumerate(zip(seen, seen[1:])) if y < x]
    assert len(resets) == 2 and len(set(seen)) >= 4 and seen.count(10) >= 3 and {n for _,n in b} >= {10,5}, b
    assert [len(t)-1 for t in tables(shown[FIT])] == sorted(len(t)-1 for t in tables(shown[FIT])) and {len(t)-1 for t in tables(shown[FIT])} == {0,1,2,3}
    assert sum('image/png' in d for d in shown[FIT]) == sum('image/png' in d for d in shown[REF]) >= 4
    assert '... 2.' in ''.join(html(shown[FIT]))    # the smooth loss beside the bar
    # the first step of each program is said to compile, in each fit of `fine_tune`
    assert compiling(shown[FIT])[0] == (0,10) and (0,5) in compiling(shown[FIT]) and all(i <= 1 for i,_ in compiling(shown[FIT])), compiling(shown[FIT])
    assert compiling(shown[TUNE]).count((0,10)) == compiling(shown[TUNE]).count((0,5)) == 2 and not compiling(shown[REF])
    assert [len(t) for t in tables([o['data'] for o in outs[TUNE] if 'data' in o])] == [2,2]
    # a callback of the call, given as a class
    assert kinds(outs[CLASS]) == kinds(outs[FIT]), kinds(outs[CLASS])
    # fastai's `no_logging` leaves the bars
    assert not streams(outs[QUIET]) and not tables(shown[QUIET]) and len(bars(shown[QUIET])) > 4, outs[QUIET]
    assert outs[SILENT] == [] and not shown[SILENT], outs[SILENT]
    text = ''.join(t for _,t in streams(outs[NO_BAR])).splitlines()
    assert len(outs[NO_BAR]) == len(streams(outs[NO_BAR])) and len(text) == 3 and text[0]+'\\n' == line and text[1].split() == names, outs[NO_BAR]
    ''', tmp_path, timeout=200)

def test_other_verbs_in_a_notebook(tmp_path):
    "Predicting, validating and the finder draw bars as in fastai; nothing of it stays but the result, and the finder's plot"
    verbs = ['get_preds()[0].shape', 'validate()', 'lr_find(num_it=25)', 'tta(n=2)[0].shape']
    call = lambda o: [f'learn.xla_{o}', f'ref.{o}']
    notebook([START + MAKE, '''
        def loaders(bs):
            dsets = Datasets(range(320), [[lambda i: X[i]], [lambda i: Y[i]]], splits=[list(range(200)), list(range(200, 320))])
            return dsets.dataloaders(bs=bs, device='cpu', num_workers=0, drop_last=False)
        learn,ref = make(16, dls=loaders(16)),make(32, dls=loaders(32))
        with learn.no_logging(), learn.no_bar(), ref.no_logging(), ref.no_bar(): learn.xla_fit(1); ref.fit(1)
        learn.add_cb(ShowGraphCallback())
        def state(): return (vec(learn).tolist(), str(learn.opt.state_dict()), str({k: v for k,v in vars(learn.recorder).items() if k != 'learn'}), sorted(k for k in vars(learn)), [id(o) for o in learn.cbs], sorted(vars(learn.progress)), learn.logger, learn.create_mbar)
        before = state()''', *(o for v in verbs for o in call(v)), '''
        after = state()
        for a,b in list(zip(before, after))[:2] + list(zip(before, after))[4:]: assert a == b, (a, b)
        untouched()''', *(f'with learn.no_logging(), learn.no_bar(): res = learn.xla_{v}' for v in ('get_preds()', 'validate()', 'lr_find(num_it=25, show_plot=False)'))], '''
    for i in (2, 4, 6, 8):
        a,b = outs[i],outs[i+1]
        if i != 8: assert [o for o in kinds(a) if o[1] != ['text/html', 'text/plain']] == [o for o in kinds(b) if o[1] != ['text/html', 'text/plain']], (i, kinds(a), kinds(b))
        assert [(n, re.sub('[0-9]+ steps', 'N steps', t)) for n,t in streams(a)] == [('stdout', '2 cores x bs 16 = 32 a step, N steps an epoch\\n')], streams(a)
        results = [[o['data']['text/plain'] for o in x if o['output_type'] == 'execute_result'] for x in (a, b)]
        assert len(results[0]) == 1 and (results[0] == results[1] or i in (4, 6)), results
        moved = bars(shown[i])
        assert len({x for x,_ in moved}) >= 3 and {n for _,n in moved} <= {n for _,n in bars(shown[i+1])}, (i, moved, bars(shown[i+1]))
        assert compiling(shown[i])
        assert '<progress' not in ''.join(html([o['data'] for o in a if o['output_type'] == 'display_data'])), a   # bars don't stay
    assert sum('image/png' in o.get('data', {}) for o in outs[6]) == 1
    for o,s in zip(outs[-3:], shown[-3:]): assert o == [] and s == [], o
    ''', tmp_path, timeout=200)

def test_stop_in_a_notebook(tmp_path):
    "The stop button in the middle of a long fit: KeyboardInterrupt within seconds, no process left, and the next cell trains"
    code = [START + MAKE + "learn = make(16)\nlearn.path = Path()", 'learn.xla_fit(200)', '''
children = [p for p in os.listdir('/proc') if p.isdigit() and Path(f'/proc/{p}/stat').exists() and Path(f'/proc/{p}/stat').read_text().rpartition(')')[2].split()[1] == str(os.getpid())]
assert not children and not mp.active_children() and learn.logger is print and learn.create_mbar is True, children
done = learn.recorder.values
assert learn.epoch == len(done)-1 >= 0 and {p.device.type for p in learn.model.parameters()} == {'cpu'}
ref = learner(32)
with ref.no_logging(): ref.fit(len(done))
same(learn, ref, what='the finished epochs')
print(len(done))''', 'with learn.no_logging(): learn.xla_fit(1)\nprint(len(learn.recorder.values))\nuntouched()']
    (tmp_path/'cells.json').write_text(json.dumps(code))
    res = run_code(f'''
    import json, re, time
    from queue import Empty
    from jupyter_client.manager import start_new_kernel
    setup,fit,look,again = json.load(open({str(tmp_path/'cells.json')!r}))
    km,kc = start_new_kernel(kernel_name='python3')
    def run(code, on_message=None):
        "What the cell printed or raised, and how long it went on after `on_message` gave True"
        msg_id,text,error,stopped,end = kc.execute(code),'',None,None,time.monotonic()+90
        while time.monotonic() < end:
            try: m = kc.get_iopub_msg(timeout=1)
            except Empty: continue
            if m['parent_header'].get('msg_id') != msg_id: continue
            if m['msg_type'] == 'stream': text += m['content']['text']
            if m['msg_type'] == 'error': error = m['content']['ename']
            if m['msg_type'] == 'status' and m['content']['execution_state'] == 'idle': return text,error,stopped and time.monotonic()-stopped
            if on_message and not stopped and on_message(m): stopped = time.monotonic(); km.interrupt_kernel()
        raise AssertionError(f'still running: {{text}}')
    def in_the_middle(m):
        "In the second epoch's training"
        return m['msg_type'] == 'update_display_data' and re.search('max="200" value="1".*max="10" value="[3-9]"', str(m['content']['data']), flags=re.S)
    try:
        assert run(setup)[1] is None
        text,error,seconds = run(fit, in_the_middle)
        assert error == 'KeyboardInterrupt' and seconds < 10, (text, error, seconds)
        assert text.splitlines() == ['2 cores x bs 16 = 32 a step, 10 steps an epoch', 'The learner is as of the end of epoch 0'], text
        assert run(look)[:2] == ('1\\n', None), run(look)
        assert run(again)[:2] == ('1\\n', None), run(again)
        print(f'{{seconds:.1f}} s')
    finally: kc.stop_channels(); km.shutdown_kernel(now=False)
    print('finished')
    ''', env={'IPYTHONDIR':tmp_path}, timeout=150)
    assert res.rstrip().endswith('finished'), res
    print(res)

def test_terminal():
    "In a terminal: bars that move, and the table, by fastai's own console bars; nothing where logging and bars are off"
    run(MAKE + """
import pty, re, select
def on_a_terminal(what):
    "What this script shows on a terminal when it does `what`, and what the recorder holds afterwards"
    ours,its = pty.openpty()
    p = subprocess.Popen([sys.executable, __file__, what], stdin=subprocess.DEVNULL, stdout=its, stderr=its, env={**os.environ, 'COLUMNS':'150', 'MPLBACKEND':'agg'})
    os.close(its)
    res = b''
    while True:
        try: got = os.read(ours, 65536)
        except OSError: break    # the terminal's other end is closed
        if not got: break
        res += got
    os.close(ours)
    assert p.wait() == 0, res.decode()
    return re.split('[\\r\\n]+', res.decode())
def bars(lines): return [tuple(map(int, re.search(r'\\[(\\d+)/(\\d+) ', l).groups())) for l in lines if re.search(r'\\|[█-]+\\| .*%', l)]
if sys.argv[1:]:
    learn = make(16)
    learn.recorder.before_fit()
    if sys.argv[1] == 'silent':
        with learn.no_logging(), learn.no_bar(): learn.xla_fit(1); learn.xla_get_preds(); learn.xla_validate(); learn.xla_lr_find(num_it=10, show_plot=False)
    else: exec(sys.argv[1])
    sys.exit()
line = '2 cores x bs 16 = 32 a step, 10 steps an epoch'
shown = on_a_terminal('learn.xla_fit(2); print(); print([list(map(float, o)) for o in learn.recorder.values])')
assert shown[0] == line, shown
values = eval([l for l in shown if l.startswith('[[')][0])
rows = [l.split() for l in shown if re.match(r'(epoch|[01]) +', l)]
assert rows[0] == ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'time'] and [r[0] for r in rows[1:]] == ['0', '1'], rows
assert np.allclose([[float(o) for o in r[1:4]] for r in rows[1:]], values, atol=2e-6), (rows, values)
moved = bars(shown)
assert len({i for i,n in moved if n == 10}) >= 4 and len({i for i,n in moved if n == 5}) >= 3, shown
assert any('Epoch 2/2 :' in l for l in shown)
says = [l for l in shown if 'compiling' in l]
assert says and all('Epoch 1/2 :' in l for l in says) and {n for _,n in bars(says)} == {10, 5}, says
parts = '\\n'.join(on_a_terminal("learn.xla_get_preds(); print('\\\\n=====end'); learn.xla_validate(); print('\\\\n=====end'); learn.xla_lr_find(num_it=15, show_plot=False)")).split('=====end')
for part,steps in zip(parts, (5, 5, 10), strict=True):
    shown = part.strip().split('\\n')
    assert len({i for i,n in bars(shown) if n == steps}) >= 3 and shown[0].startswith('2 cores x bs 16 = 32 a step'), shown
shown = on_a_terminal('silent')
assert shown == [''], shown
untouched()
""")
