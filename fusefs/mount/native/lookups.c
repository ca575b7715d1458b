/* What nodes are: GETATTR, GETXATTR, LISTXATTR. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <sys/xattr.h>

static const int GETXATTRAT = 464, LISTXATTRAT = 465; /* Linux 6.13 */
static const char LABEL[] = "security.selinux";
enum { VALUE_BYTES = 4096 };

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
            known.node->is_told |= !is_unsteady(known.node);
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
static int value_of(Request *request, Known *known, bool is_directory, const char *name, char *value) {
    const Core *core = request->core;
    Seen seen;
    char path[32];
    int n, fd;
    if (known->fd != NULL)
        return is_directory ? value_at(known->fd->number, ".", 0, name, value)
                            : value_at(known->fd->number, "", AT_EMPTY_PATH, name, value);
    if (!core->is_shared && known->dir_fd != NULL) {
        n = value_at(known->dir_fd->number, known->name, AT_SYMLINK_NOFOLLOW, name, value);
        return look_by_name(core, known, &seen) ? -ESTALE : n;
    }
    if (reach(request->core, known, &seen, &fd))
        return -ESTALE;
    if (fd < 0)
        return value_at(known->fd->number, ".", 0, name, value);
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
    int n = value_of(request, &known, is_directory, name, value);
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
