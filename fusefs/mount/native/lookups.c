/* What names and nodes are: LOOKUP, GETATTR, GETXATTR, LISTXATTR. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <sys/xattr.h>

static const int GETXATTRAT = 464, LISTXATTRAT = 465; /* Linux 6.13 */
static const char LABEL[] = "security.selinux";
enum { VALUE_BYTES = 4096 };

/* The node of a nodeid, and how it is reached: it is open, a directory of which an fd is, or has a name in such a one.
 * Returns 0, or -1: not ours. */
int open_known(Request *request, uint64_t nodeid, Known *known) {
    Core *core = request->core;
    *known = (Known){.node = live_node(request, nodeid)};
    Node *node = known->node;
    if (node == NULL)
        return -1;
    if (node->dev != core->root_dev || !node->n_handle)
        goto not_ours;
    if (node->handles != NULL)
        known->fd = fd_take(node->handles->fd);
    else if (node->is_directory)
        known->fd = directory_fd(core->tables, node);
    else if (node->at.parent != NULL && strlen(node->at.name) <= NAME_MAX) {
        known->above = node_take(node->at.parent);
        known->dir_fd = directory_fd(core->tables, known->above);
        strcpy(known->name, node->at.name);
    }
    if (known->fd != NULL || known->dir_fd != NULL)
        return 0;
not_ours:
    close_known(known);
    return -1;
}

void close_known(Known *known) {
    fd_put(known->fd);
    fd_put(known->dir_fd);
    node_put(known->node);
    node_put(known->above);
    *known = (Known){0};
}

static bool is_it(const Core *core, const Known *known, Seen *seen, int fd) {
    const Node *node = known->node;
    if (seen->ino != node->ino || seen->dev != node->dev)
        return false;
    if (!core->is_shared && seen->btime_ns)
        return seen->btime_ns == node->btime_ns;
    return handle_of(fd, "", AT_EMPTY_PATH, seen) == 0 &&
           node->n_handle == 2 * sizeof(uint32_t) + seen->handle.n_bytes &&
           !memcmp(node->handle, &seen->handle, node->n_handle);
}

/* Look at a node, of which an fd is the caller's then, if it is another than `known->fd`; without the interpreter's
 * lock. Returns 0, or an errno: ESTALE, if it is to be found otherwise. */
int reach(const Core *core, const Known *known, Seen *seen, int *fd) {
    *fd = -1;
    if (known->fd != NULL)
        return look(known->fd->number, "", core->statx_flags, seen);
    int held = openat(known->dir_fd->number, known->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (held < 0)
        return ESTALE;
    int error = look(held, "", core->statx_flags, seen);
    if (!error && !is_it(core, known, seen, held))
        error = ESTALE;
    if (error)
        close(held);
    else
        *fd = held;
    return error;
}

int do_lookup(Request *request) {
    Core *core = request->core;
    Place place;
    Seen seen;
    int result = NOT_OURS;
    if (open_place(request, request->nodeid, request->payload, &place) < 0)
        return NOT_OURS;
    calls_begin(request);
    Timed timed = time_begin(core);
    int error = looking(request)(place.fd->number, place.name, core->statx_flags, &seen);
    time_end(core, &timed, 1);
    calls_end(request);
    tell_took(request, &timed, 1);
    if (is_changed(request, place.node)) /* two inodes may have been seen, or one that has another name by now */
        result = NOT_OURS;
    else if (error == ENOENT)
        result = put_missing(request);
    else if (!error && seen.dev == core->root_dev) {
        Node *node = learn(request, &place, &seen);
        counted(node, true);
        result = put_entry(request, request->answer, node, &seen, !is_unsteady(node));
        node_put(node);
    }
    close_place(&place);
    return result;
}

int do_getattr(Request *request) {
    Core *core = request->core;
    Known known;
    Seen seen;
    int fd, result = NOT_OURS;
    if (open_known(request, request->nodeid, &known) < 0)
        return NOT_OURS;
    if (is_outside(core, known.node)) {
        calls_begin(request);
        Timed timed = time_begin(core);
        int error = reach(core, &known, &seen, &fd);
        if (fd >= 0)
            close(fd);
        time_end(core, &timed, 1);
        calls_end(request);
        tell_took(request, &timed, 1);
        if (!error) {
            known.node->is_told |= !known.node->is_directory && !is_unsteady(known.node);
            result = put_attr(request, known.node, &seen, !is_unsteady(known.node));
        }
    }
    close_known(&known);
    return result;
}

/* struct xattr_args of getxattrat(2). */
struct room {
    uint64_t value;
    uint32_t size, flags;
};

/* The value of an attribute, or the list of all their names. name: NULL: that list
 * Returns how many bytes, or a negative errno. */
static int value_at(int dir_fd, const char *path, int flags, const char *name, char *value) {
    struct room room = {(uint64_t)(uintptr_t)value, VALUE_BYTES, 0};
    long n = name == NULL ? syscall(LISTXATTRAT, dir_fd, path, flags, value, (size_t)VALUE_BYTES)
                          : syscall(GETXATTRAT, dir_fd, path, flags, name, &room, sizeof room);
    return n < 0 ? -errno : (int)n;
}

/* The same of a node, without the interpreter's lock; -ESTALE: it is to be found otherwise.
 *
 * No call takes an O_PATH fd for an attribute's (EBADF). Of a directory, which we have open so, "." is asked. Where
 * nothing is renamed but through the mount, a file is asked by its name, and one look tells whether it was that, if no
 * name was changed there meanwhile. Where others rename, two renames could make the name ours between the two calls; the kernel
 * would keep the other file's ACL. So there we hold what we looked at, and ask that. */
static int value_of(const Core *core, const Known *known, bool is_directory, const char *name, char *value) {
    Seen seen;
    char path[32];
    int n, fd;
    if (known->fd != NULL)
        return is_directory ? value_at(known->fd->number, ".", 0, name, value)
                            : value_at(known->fd->number, "", AT_EMPTY_PATH, name, value);
    if (!core->is_shared) {
        n = value_at(known->dir_fd->number, known->name, AT_SYMLINK_NOFOLLOW, name, value);
        return !look(known->dir_fd->number, known->name, core->statx_flags, &seen) && is_it(core, known, &seen, -1) ? n : -ESTALE;
    }
    if (reach(core, known, &seen, &fd))
        return -ESTALE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    n = value_at(AT_FDCWD, path, 0, name, value);
    close(fd);
    return n;
}

/* Leave out names that are not shown. Returns how many bytes are left; NOT_OURS: that depends on the caller, or the
 * filesystem's list lacks the NUL at its end, which Python sorts out. */
static int only_shown(const Core *core, char *listed, int n) {
    char *end = listed;
    for (char *at = listed; at < listed + n;) {
        size_t room = (size_t)(listed + n - at), size = strnlen(at, room) + 1;
        if (size > room || !strncmp(at, "trusted.", 8))
            return NOT_OURS;
        if (!core->hides_labels || strcmp(at, LABEL)) {
            memmove(end, at, size);
            end += size;
        }
        at += size;
    }
    return (int)(end - listed);
}

/* Answer with a value, or with the list of all names. */
static int tell_value(Request *request, const char *name) {
    Core *core = request->core;
    Known known;
    char value[VALUE_BYTES];
    uint32_t room;
    int result = NOT_OURS;
    memcpy(&room, request->own, sizeof room);
    if (!core->tells_xattrs)
        return NOT_OURS;
    if (open_known(request, request->nodeid, &known) < 0)
        return NOT_OURS;
    bool is_directory = known.node->is_directory;
    calls_begin(request);
    int n = value_of(core, &known, is_directory, name, value);
    calls_end(request);
    if (known.above != NULL && is_changed(request, known.above))
        result = NOT_OURS;
    else if (n == -ENODATA)
        result = n;
    else if (n >= 0) {
        if (name == NULL)
            n = only_shown(core, value, n);
        if (n == NOT_OURS)
            result = n;
        else if (!room) {
            uint32_t told[2] = {(uint32_t)n, 0};
            memcpy(request->answer, told, sizeof told);
            result = sizeof told;
        } else if ((uint32_t)n > room)
            result = -ERANGE;
        else {
            memcpy(request->answer, value, n);
            result = n;
        }
    }
    close_known(&known);
    return result;
}

int do_getxattr(Request *request) {
    char name[XATTR_NAME_MAX + 1];
    if (strlen(request->payload) > XATTR_NAME_MAX)
        return NOT_OURS;
    strcpy(name, request->payload);
    if (request->core->hides_labels && !strcmp(name, LABEL))
        return NOT_OURS;
    return tell_value(request, name);
}

int do_listxattr(Request *request) { return tell_value(request, NULL); }
