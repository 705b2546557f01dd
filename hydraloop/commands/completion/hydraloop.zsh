# Completes command lines of hydraloop: python train.py …, python -m hydraloop …, hydraloop …
_hydraloop() {
    local python=$words[1] code='import importlib.util as u, runpy; runpy.run_path(u.find_spec("hydraloop").submodule_search_locations[0] + "/commands/completion/answer.py", run_name="__main__")'
    [[ ${python:t} == hydraloop ]] && python=${${python:c}:A:h}/python
    local -a found=(${(f)"$(${(Q)~python} -P -c $code zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
    (($#found)) || { _default; return }
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _hydraloop python python3 hydraloop
