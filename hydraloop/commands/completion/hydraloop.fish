# Completes command lines of hydraloop: python train.py …, python -m hydraloop …, hydraloop …
function __hydraloop
    set -l python (commandline -opc)[1]
    test (basename $python) = hydraloop; and set python (dirname (realpath (command -s $python)))/python
    set -l code 'import importlib.util as u, runpy; runpy.run_path(u.find_spec("hydraloop").submodule_search_locations[0] + "/commands/completion/answer.py", run_name="__main__")'
    $python -P -c $code fish (commandline -cp) 2>/dev/null
end
for name in python python3 hydraloop
    complete -c $name -a '(__hydraloop)'
end
