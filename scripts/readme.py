"""Write README.md, or the file named on the command line, from nbs/index.ipynb.

`nbdev-readme` does this through quarto, which pip does not install. Cells with `#| hide` or `#| include: false` are left out,
`#| echo: false` leaves out the code and `#| output: false` the outputs."""
import os,re,sys
from pathlib import Path
from fastcore.ansi import strip_ansi
from fastcore.nbio import concat_streams,join_out,preferred_msg_out,read_nb

root = Path(__file__).resolve().parent.parent
index = root/'nbs'/'index.ipynb'
header = '<!-- Made from nbs/index.ipynb by `make readme`: edit the notebook -->'

def fenced(text, lang=''):
    fence = '`' * max([3] + [len(o)+1 for o in re.findall('`{3,}', text)])
    return f'{fence}{lang}\n{text}\n{fence}'

def from_root(text):
    "Make links to files right for a reader in the root: they were written in `nbs`"
    def _f(m):
        path,hash_,part = m[1].partition('#')
        target = index.parent/path
        return f"]({Path(os.path.relpath(target, root)).as_posix()}{hash_}{part})" if path and target.exists() else m[0]
    return re.sub(r'\]\(([^)\s]+)\)', _f, text)

def output(out):
    mime,text = preferred_msg_out(out, html1st=False)
    if any(o.startswith('image/') for o in out.get('data', ())):
        raise SystemExit(f'{index.name}: an image in an output has no place in README.md; save it as a file and link to it')
    text = strip_ansi(join_out(text)).strip('\n')
    return text if mime == 'text/markdown' else fenced(text, 'text') if text else ''

def blocks(cell):
    dirs = cell.directives
    if 'hide' in dirs or dirs.get('include') == 'false': return
    cell.remove_directives()
    src = cell.source.strip()
    if cell.cell_type == 'markdown': yield from_root(src)
    if cell.cell_type != 'code' or not src: return
    if dirs.get('echo') != 'false': yield fenced(src, 'python')
    if dirs.get('output') != 'false': yield from map(output, concat_streams(cell.outputs))

body = [header] + [o for cell in read_nb(index).cells for o in blocks(cell) if o]
dest = Path(sys.argv[1]) if sys.argv[1:] else root/'README.md'
dest.write_text('\n\n'.join(body) + '\n', encoding='utf-8')
