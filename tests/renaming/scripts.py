"""What is played, a command line each, and the files that it takes."""

from __future__ import annotations

from types import MappingProxyType

SCENE = """\
--version
list
status
stats
holders .
doctor .
pause
pause --for 1h --json .
resume
resume .
init --json .
init .
check
check --json .
! make a
check a
holders a
holders --json a
swap --dry-run a
swap --dry-run --json a
swap a
! make b
swap --json --note hello --keep-for 3h b
! make c
swap --keep *le --json c
swap --now --json c
! make e
rm e/file e/d
rm --json e
list --volume .
list --json --volume .
list --long --volume .
restore --volume . <a>
restore --volume . <a>
restore --json --to B --volume . <b>
restore --volume . <b>
keep --volume . <file>
keep --for 2d --json --volume . <file>
keep --volume . nothing
! make g
swap --keep-for 0s g
reap --volume . <g> --dry-run
reap --volume . <g>
reap --json --volume . --now <d>
reap --volume .
reap --json --volume .
! make_flagged q
swap --keep-for 0s q
reap --volume . --now <q>
quarantine list --volume .
quarantine list --json --volume .
quarantine retry --volume . <q>
quarantine restore --json --volume . <q>
! make p
sweep p --name *.log --dry-run
sweep p --name *.log --print
sweep p --name *.log --print --json
sweep p --name *.log
sweep p --name deeper --json
restore --volume . <p>
sweep p --type f --delete
! make m
! mkdir moved
sweep m --name *.log --move-to moved
sweep m --name file --move-to moved --json
sweep m --size +1G
! mkdir /run/played/moved
! make P
sweep P --name *.log --copy --move-to /run/played/moved
sweep P --type f --delete --json --max-delete 1
! write plan.toml PLAN
plan plan.toml
plan --json plan.toml
plan --run plan.toml
plan --run --json plan.toml
! write plan.toml WRONG_PLAN

plan plan.toml
plan --json plan.toml
! write draft.toml CONFIG
config check draft.toml
config check --json draft.toml
config check
config show
config show --json
config show .
config show --json --system .
! write /etc/trashd/config.toml CONFIG
config check
config show
config show a
! write draft.toml WRONG_CONFIG
config check draft.toml
! plant orphans/stray
doctor .
doctor --json .
doctor --rescue stray --to rescued .
doctor --json .
check --json .
! plant drop/dropped
list --volume .
list --json --volume .
! tell_status
status
status --json
status .
stats /mnt
stats --prometheus
stats --json
umount /mnt
mount --explain . /mnt
service status
service status --json
mount --explain .
init --known .
"""
"""Every command in one store of root's; `! …` is done between them, `<NAME>` the id of the newest container of that."""

WRONG = """\

bogus
--bogus
swap
swap --bogus x
swap missing
swap file
swap link
swap .
swap /
swap /proc
swap /run/played
swap --keep-for 3␣moons a
swap --now --for-owner a
swap .trashd
swap a/../.trashd/u
swap --keep [ a
swap --json missing
swap --keep-for -1s a
swap a a
swap a/b/c/d
rm
rm missing
rm missing a/file missing2
rm --json missing
rm .
rm .trashd
restore
restore missing --volume .
restore --json missing --volume .
restore x --volume /missing
restore --volume . 20261121T032253.555Z-job-2fe7e4cb8ba8
keep missing --volume .
keep --for soon x
reap --now
reap --all x
reap missing --volume .
list extra
list --volume /missing
list --volume /proc
check missing
check --json missing
holders missing
doctor /proc
doctor --forget x .
doctor --rescue x .
sweep
sweep missing
sweep a
sweep a --name
sweep a --older never
sweep a --size big
sweep a --type q
sweep a --delete --move-to b
sweep a --regex [
sweep a --name x --print --delete
sweep a --name x --copy
plan
plan missing
config check missing
config show --bogus
config
quarantine
quarantine list --volume /missing
quarantine retry
quarantine retry x --volume .
quarantine delete x --volume .
mount
mount a
mount missing b
mount a missing
mount a file
mount -o bogus a b
mount --explain missing
mount -o cache=much a b
mount -o without=sense a b
mount -o workers=0,attr_timeout=x a b
umount
umount missing
umount a
stats a
stats missing
stats --json --prometheus
status /missing
pause --for 3␣moons
service
service bogus
service install --root
init missing
init file
init /proc
reaper --bogus
reaper --config /missing extra
"""
"""Command lines that can't be; `␣` is a space in a word."""

WRONG_MOUNTS = """\

--help
a
a b c
-N x a b
-z a b
-o bogus a b
missing a
a missing
-f a b
-s -o bogus missing b
"""
"""What mount(8)'s helper can't take."""

FOR_USER = """\
list
init .
check roots
swap roots
rm --json roots
check mine/m
swap mine/m
swap --json mine/m
list --volume .
list
doctor .
reap --all --now
status
config show
pause
resume
stats
service status
sweep roots --name *
sweep mine --name * --delete
restore none
mount mine roots
umount mine
"""
"""By a user who has `mine` in a volume of root's."""

FILES = MappingProxyType(
    {
        "PLAN": """
[[rule]]
directory = "/run/played/v/p"
name = "*.log"
[[rule]]
directory = "/run/played/v/none"
older = "9d"
""",
        "WRONG_PLAN": """
[[rule]]
older = 3
""",
        "CONFIG": """
[defaults]
retention = "2d"
[[volume]]
path = "/run/played/v"
keep = ["*.log"]
""",
        "WRONG_CONFIG": """
[defaults]
retension = 1
reap = 5
[volume]
""",
    }
)
