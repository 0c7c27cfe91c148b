# What the owner of a copy has done before an upgrade. $1: the template; $2: its commit at that time.
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
mkdir old fresh
git -C "$1" archive "$2" | tar x -C old
python old/tests/template/make_copy.py mine --without explain,plots
cd mine
git init -q
git config user.name owner
git config user.email owner
git checkout -q -b main
git add -A
git commit -q -m untouched
git branch template
git apply "$1/tests/template/slow/owner.patch"
git commit -q -a -m mine
