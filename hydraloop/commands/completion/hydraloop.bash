# Completes command lines of hydraloop: python train.py …, python -m hydraloop …, hydraloop …
_hydraloop() {
    local python=$1 code='import importlib.util as u, runpy; runpy.run_path(u.find_spec("hydraloop").submodule_search_locations[0] + "/commands/completion/answer.py", run_name="__main__")'
    [[ ${1##*/} == hydraloop ]] && python=$(dirname "$(readlink -f "$(type -P "$1")")")/python
    mapfile -t COMPREPLY < <("$python" -P -c "$code" bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _hydraloop python python3 hydraloop
