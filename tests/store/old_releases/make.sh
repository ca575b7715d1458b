#!/usr/bin/env bash
# make.sh TRASHD RELEASE: makes the samples of an old release anew. TRASHD is that release's own command, for example
# from `git worktree add OLD f3c3ae17 && cd OLD && make setup`.
set -euxo pipefail
trashd=$1 release=$2
[[ ${IN_NAMESPACE:-} ]] || IN_NAMESPACE=yes exec unshare --mount --propagation private "$0" "$@"
cd "$(dirname "$0")"
here=$PWD scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT
for place in /var/lib /var/log /run; do mount -t tmpfs tmpfs $place; done
umask 022

volume() {  # NAME: an empty filesystem on /mnt, which all users can write to
    truncate --size=3M "$scratch/$1"
    mkfs.ext4 -q -F -m 0 -I 256 -N 720 -b 1024 -O ^has_journal,^resize_inode -E nodiscard "$scratch/$1"
    mount -o loop "$scratch/$1" /mnt
    rmdir /mnt/lost+found
    chmod 1777 /mnt
    install -d /mnt/home
}
save() {  # NAME
    umount /mnt
    e2fsck -fn "$scratch/$1" >/dev/null
    xz -9e --stdout "$scratch/$1" >"$here/$release-$1.xz"
}
as() {  # UID COMMAND…: as a user with a home on the volume
    local uid=$1 home=/mnt/home/$1
    shift
    [[ -d $home ]] || install -d -m 700 -o "$uid" -g "$uid" "$home"
    (cd "$home" && HOME=$home setpriv --reuid "$uid" --regid "$uid" --clear-groups --bounding-set=-all --inh-caps=-all "$@")
}
tree() {  # UID NAME: /mnt/work/UID/NAME, with what a tree can have
    install -d -m 755 /mnt/work
    install -d -m 755 -o "$1" -g "$1" "/mnt/work/$1"
    as "$1" bash -c '
        mkdir -m 2750 "$1" "$1/sub" && cd "$1"
        echo content >file; echo more >sub/more; ln file sub/linked; ln -s nowhere link; mkfifo -m 600 fifo
        chmod 640 file; setfattr -n user.tag -v x . file; setfacl -m u:4242:r-- file; setfacl -d -m u:4242:r-x .
        touch -h -d "2020-02-02 02:02:02.123456789Z" sub/* link fifo file sub .
    ' bash "/mnt/work/$1/$2"
}
killed() {  # CALL N UID COMMAND…: kill the command before its N-th system call of that name
    local call=$1 n=$2
    shift 2
    ! as "$1" strace -f -o /dev/null -e "trace=$call" -e "inject=$call:signal=KILL:when=$n" "${@:2}"
}
orphan() {  # UID NAME: the id of a user's orphan
    local found=(/mnt/.trashd/{u,new}/"$1"/orphans/*-"$2"-*)
    for one in "${found[@]}"; do [[ ! -d $one ]] || basename "$one"; done | tail --lines=1
}

# A volume of root's, after another user (1003) had made a store in it.
volume root
tree 1003 early
as 1003 "$trashd" swap --keep-for 36500d /mnt/work/1003/early
"$trashd" init /mnt
install -d /mnt/etc/trashd /mnt/spool
cp config.toml /mnt/etc/trashd
[[ $release == 0.2.0 ]] || sed -i 's/^paced = .*/&\nnodes = 4/' /mnt/etc/trashd/config.toml
as 7001 env XDG_CONFIG_HOME=/mnt/etc "$trashd" config show --json >/mnt/etc/shown.json

for uid in 0 7001; do
    for name in swapped expired kept-for pinned removed dropped parts keeps noted quarantined; do tree $uid $name; done
    w=/mnt/work/$uid
    as $uid "$trashd" swap $w/swapped
    as $uid "$trashd" swap --keep-for 1s $w/expired
    as $uid "$trashd" swap --keep-for 36500d $w/kept-for
    as $uid "$trashd" swap $w/pinned
    as $uid "$trashd" keep "$(orphan $uid pinned)"
    as $uid "$trashd" rm -r $w/removed
    mv $w/dropped /mnt/.trashd/*/$uid/drop
    as $uid "$trashd" list
    as $uid "$trashd" swap $w/parts
    as $uid "$trashd" restore $w/parts/sub/more
    as $uid "$trashd" swap --keep sub --keep file $w/keeps
    as $uid "$trashd" swap --note 'a note' $w/noted
    as $uid mkdir -p $w/tmp/sub
    as $uid touch $w/tmp/{one,two,sub/three}.log $w/tmp/stays
    as $uid "$trashd" sweep $w/tmp --name '*.log' --keep-for 36500d
    if ((uid)); then
        install -d -m 755 $w/quarantined/roots && touch $w/quarantined/roots/file
    else
        touch $w/quarantined/immutable && chattr +i $w/quarantined/immutable
    fi
    as $uid "$trashd" swap $w/quarantined
    as $uid "$trashd" reap --now "$(orphan $uid quarantined)" || true
done
as 7001 mkdir /mnt/work/7001/$'odd %\xff\n'
as 7001 "$trashd" swap --keep-for 36500d /mnt/work/7001/$'odd %\xff\n'
tree 7001 by-root
"$trashd" swap --for-owner --keep-for 36500d /mnt/work/7001/by-root
mkdir /mnt/work/inner
mount --bind /mnt/work/inner /mnt/work/inner
mkdir /mnt/work/inner/job
"$trashd" swap --keep-for 36500d /mnt/work/inner/job
umount /mnt/work/inner

# Root's plan and service.
touch -d 2020-01-01 /mnt/work/7001/tmp/old.log
chown 7001:7001 /mnt/work/7001/tmp/old.log
printf '[[rule]]\ndirectory = "/mnt/work/*/tmp"\nname = "*.log"\nolder = "36500d"\npurgelist = { directory = "/mnt/spool", ahead = "36000d" }\n' >/mnt/etc/purge.toml
"$trashd" plan apply /mnt/etc/purge.toml
as 7001 mkdir -p lists
as 7001 bash -c "sed 's|/mnt/work/.*/tmp|/mnt/work/7001/tmp|; s|/mnt/spool|/mnt/home/7001/lists|' /mnt/etc/purge.toml >purge.toml; $trashd plan apply purge.toml"
"$trashd" pause /mnt
"$trashd" service run --config /mnt/etc/trashd &
until "$trashd" status; do [[ -d /proc/$! ]]; done
kill -TERM $!
wait $!

# Killed commands, each of a user of its own: any later command would recover them.
for uid in 2001 2002 2003 2004 2005 2006 2007; do tree $uid job; tree $uid first; as $uid "$trashd" swap --keep-for 36500d /mnt/work/$uid/first; done
"$trashd" list >/dev/null
killed renameat2 1 2001 "$trashd" swap --keep-for 36500d /mnt/work/2001/job       # before the exchange
killed renameat 1 2002 "$trashd" swap --keep-for 36500d /mnt/work/2002/job        # after it
for uid in 2003 2004 2005; do as $uid "$trashd" swap --keep-for 36500d /mnt/work/$uid/job; done
killed renameat2 1 2003 "$trashd" restore "$(orphan 2003 job)"                    # claimed
killed unlinkat 1 2004 "$trashd" restore "$(orphan 2004 job)"                     # put back
killed unlinkat 3 2005 "$trashd" reap --now "$(orphan 2005 job)"                  # in the tree
killed renameat 2 2006 "$trashd" rm -r /mnt/work/2006/job                            # in its container
as 2007 touch /mnt/work/2007/job/{1,2,3}.log
killed renameat2 2 2007 "$trashd" sweep --name '*.log' --keep-for 36500d /mnt/work/2007/job  # one of three files taken
tree 2008 new
as 2008 "$trashd" swap --keep-for 36500d /mnt/work/2008/new                       # root has not seen this user
tree 2008 waiting
as 2008 mv /mnt/work/2008/waiting /mnt/.trashd/new/2008/drop
cp -a /var/lib/trashd /mnt/state
cp -a /run/trashd /mnt/run
save root

# A volume on which a user made the store: 0.3.0 gave it the name of root's.
volume users
for name in job other expired; do
    tree 7001 $name
    as 7001 "$trashd" swap --keep-for "$([[ $name == expired ]] && echo 1s || echo 36500d)" /mnt/work/7001/$name
done
cp -a /var/lib/trashd /mnt/state
save users
ls -l "$here"
