"""How soon a fault on the cores reaches the caller: the cells that tests/test_faults.py checks, on 4 emulated cores.

`python benchmarks/faults.py` prints the table that is kept in benchmarks/faults.md."""
import datetime,json,os,platform,re,sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
from helpers import run_code

def cpu():
    try: return next(o.split(':')[1].strip() for o in open('/proc/cpuinfo') if o.startswith('model name'))
    except (OSError, StopIteration): return platform.processor()

print(f'{datetime.date.today()}, {cpu()}, {os.cpu_count()} CPUs, Python {platform.python_version()}. Seconds from the fault until the caller has its exception, and of the whole call, '
      'with the start of the cores and, in a fit, one good epoch before the fault. Each cell is checked: the exception, what it says, that nothing lives on, and that the next call works.\n')
print('| fault | where | the caller gets | after the fault | whole call |\n|---|---|---|---:|---:|')
for group in 'events','data','ends','inference':
    res = run_code(f'from fault_matrix import main; main({group!r})', timeout=400, env={'PYTHONPATH': f'{root}{os.pathsep}{root/"tests"}'})
    for row in re.findall('^row (.*)', res, re.MULTILINE):
        r = json.loads(row)
        print(f"| {r['fault']} | {r['where']} | {r['gets']} | {r['after']:.1f} | {r['took']:.1f} |", flush=True)
