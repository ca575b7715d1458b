/* Extended attributes and ACLs, which are extended attributes: SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR.
 *
 * SELinux labels are not supported. With SELinux, the kernel labels the whole mount, without requests. Without it,
 * `ls -l` reads the label of each entry, unless one reply is that labels are not supported. */
#include "core.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <sys/xattr.h>

static const int GETXATTRAT = 464, LISTXATTRAT = 465; /* since Linux 6.13 */
static const char LABEL[] = "security.selinux", TRUSTED[] = "trusted.", USERS[] = "user.", ACL[] = "system.posix_acl_",
                  CAPABILITY[] = "security.capability";
enum { SYS_ADMIN = 21, SETFCAP = 31 };

/* struct xattr_args of getxattrat(2). */
struct xattr_args_at {
    uint64_t value;
    uint32_t size, flags;
};

/* Return whether getxattrat and listxattrat work: kernels before Linux 6.13 lack them, containers may deny them. */
bool has_getxattrat_calls(void) {
    char value;
    return syscall(GETXATTRAT, -1, "name", 0, "user.none", NULL, (size_t)0) < 0 && errno != ENOSYS && errno != EPERM &&
           syscall(LISTXATTRAT, -1, "name", 0, &value, (size_t)1) < 0 && errno == EBADF;
}

static bool begins(const char *xattr, const char *word) { return !strncmp(xattr, word, strlen(word)); }

/* Get an attribute of a name in a directory. name: "": of the open file; NULL: of the inode of an O_PATH fd. xattr:
 * NULL: the list of all names. Returns its size, or a negative errno. */
static int get_xattr_at(const Core *core, int fd, const char *name, const char *xattr, char *value) {
    char path[NAME_MAX + 32];
    struct xattr_args_at args = {(uint64_t)(uintptr_t)value, XATTR_SIZE_MAX, 0};
    long n;
    if (name != NULL && core->has_getxattrat) {
        int flags = *name ? AT_SYMLINK_NOFOLLOW : AT_EMPTY_PATH;
        n = xattr == NULL ? syscall(LISTXATTRAT, fd, name, flags, value, (size_t)XATTR_SIZE_MAX)
                          : syscall(GETXATTRAT, fd, name, flags, xattr, &args, sizeof args);
        return n < 0 ? -errno : (int)n;
    }
    bool is_itself = name == NULL || !*name;
    snprintf(path, sizeof path, is_itself ? "/proc/self/fd/%d" : "/proc/self/fd/%d/%s", fd, name);
    if (xattr == NULL)
        n = (is_itself ? listxattr : llistxattr)(path, value, XATTR_SIZE_MAX);
    else
        n = (is_itself ? getxattr : lgetxattr)(path, xattr, value, XATTR_SIZE_MAX);
    return n < 0 ? -errno : (int)n;
}

/* Get an attribute of a node. Called without the tables lock. Returns its size, or a negative errno.
 *
 * No system call gets an attribute by an O_PATH fd itself (EBADF). A directory, which is open in that way, is reached
 * as ".". A file is reached by its name if everything is renamed through the mount: afterwards, one statx shows whether
 * that name was the file, if no name was changed there meanwhile. If others may rename, two renames could give the name
 * to our file between the two calls, and the kernel would cache the other file's ACL. In that case, the node is
 * opened (O_PATH). */
static int get_xattr_of_node(Request *request, Route *route, const char *xattr, char *value) {
    Core *core = request->core;
    Stat st;
    int fd;
    bool is_as_root = core->is_for_all || !core->acts_as_others;
    if (route->fd != NULL && is_as_root) {
        int n = get_xattr_at(core, route->fd->number, route->node->is_directory ? "." : "", xattr, value);
        if (n != -EBADF) /* EBADF: an O_PATH fd that is held for a client that got ESTALE */
            return n;
    }
    if (route->fd == NULL && route->dir_fd != NULL && !core->is_shared && core->is_for_all) {
        int n = get_xattr_at(core, route->dir_fd->number, route->name, xattr, value);
        tables_lock(core->mutex);
        bool is_moved = is_changed(request, route->parent_node);
        tables_unlock(core->mutex);
        if (!is_moved && !stat_by_name(core, route, &st))
            return n;
    }
    int error = reach_inode(core, route, &st, &fd);
    if (error)
        return -error;
    int held = fd < 0 ? route->fd->number : fd, n = -EACCES;
    const char *name = route->node->is_directory ? "." : NULL;
    if (is_as_root)
        n = get_xattr_at(core, held, name, xattr, value);
    else
        for (CallerAttempts attempts = attempt_to_read(request); next_attempt(&attempts, &error);
             error = n < 0 ? -n : 0)
            n = get_xattr_at(core, held, name, xattr, value);
    if (fd >= 0)
        close(fd);
    return n;
}

/* Remove names that the caller may not see from a list. Returns its new size. */
static int remove_hidden_names(const Request *request, char *listed, int n) {
    char *end = listed;
    int sees_trusted = -1; /* not yet checked */
    for (char *at = listed; at < listed + n;) {
        size_t room = (size_t)(listed + n - at), size = strnlen(at, room) + 1;
        if (size > room) /* the filesystem's list lacks its last NUL */
            break;
        bool is_shown = !request->core->hides_labels || strcmp(at, LABEL);
        if (begins(at, TRUSTED)) {
            if (sees_trusted < 0)
                sees_trusted = is_capable(request, SYS_ADMIN);
            is_shown = sees_trusted;
        }
        if (is_shown) {
            memmove(end, at, size);
            end += size;
        }
        at += size;
    }
    return (int)(end - listed);
}

/* Reply with a value, or with the list of all names. */
static int reply_value(Request *request, const char *xattr) {
    Core *core = request->core;
    Route route;
    uint32_t room;
    memcpy(&room, request->op_in, sizeof room);
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    calls_begin(request);
    int n = get_xattr_of_node(request, &route, xattr, request->reply_body);
    if (n >= 0 && xattr == NULL)
        n = remove_hidden_names(request, request->reply_body, n);
    calls_end(request);
    if (!core->is_for_all && xattr != NULL && begins(xattr, ACL))
        invalidate_attributes(core->tables, route.node); /* else the kernel would cache it for the next user, too */
    if (n < 0)
        result = n == -ENOSYS ? -EOPNOTSUPP : n; /* ENOSYS would turn off all attributes */
    else if (!room) {
        uint32_t size[2] = {(uint32_t)n, 0};
        memcpy(request->reply_body, size, sizeof size);
        result = sizeof size;
    } else
        result = (uint32_t)n > room ? -ERANGE : n;
    close_route(&route);
    return result;
}

/* Get the attribute's name, and the bytes after it, from the payload. Returns 0, a negative errno, or NOT_OURS. */
static int parse_xattr_name(const Request *request, char xattr[XATTR_NAME_MAX + 1], const char **value) {
    size_t n = strnlen(request->payload, request->n_payload);
    if (!request->core->shows_xattrs)
        return -ENOSYS;
    if (!n || n == request->n_payload || n > XATTR_NAME_MAX)
        return n > XATTR_NAME_MAX ? -ERANGE : -EINVAL;
    memcpy(xattr, request->payload, n + 1); /* the reply may overwrite the payload */
    *value = request->payload + n + 1;
    return request->core->hides_labels && !strcmp(xattr, LABEL) ? -EOPNOTSUPP : 0;
}

int do_getxattr(Request *request) {
    char xattr[XATTR_NAME_MAX + 1];
    const char *value;
    int result = parse_xattr_name(request, xattr, &value);
    return result ? result : reply_value(request, xattr);
}

int do_listxattr(Request *request) { return request->core->shows_xattrs ? reply_value(request, NULL) : -ENOSYS; }

/* Set an attribute as the caller, or remove it if there is no value. If a caller outside of the file's group sets an
 * ACL, the set-group-ID bit is cleared. Source: xattr(7), capabilities(7). Returns 0 or an errno. */
static int change_xattr(const Request *request, int fd, const Stat *st, const char *xattr, const char *value,
                        size_t n_value, int flags) {
    char path[32];
    bool is_acl = begins(xattr, ACL);
    NeededCapability needs[2];
    int n = 1, error;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (begins(xattr, USERS)) {
        needs[0] = override_of_mode(st), needs[1] = only_owner(st); /* by owner: in a sticky directory */
        n = 2;
    } else if (is_acl)
        needs[0] = only_owner(st);
    else if (!strcmp(xattr, CAPABILITY))
        needs[0] = (NeededCapability){SETFCAP, st->uid, st->gid};
    else /* no other user namespace's capability counts */
        needs[0] = (NeededCapability){SYS_ADMIN, UINT32_MAX, ANY_GROUP};
    if (value == NULL && !strcmp(xattr, CAPABILITY)) /* from the kernel, before a write, or from a caller with
                                                        CAP_SETFCAP */
        return removexattr(path, xattr) < 0 ? errno : 0;
    CallerAttempts attempts = attempt_with_needs(request, needs, n);
    if (is_acl && value != NULL && keeps_group(request, st))
        attempts.identity.gid = st->gid;
    while (next_attempt(&attempts, &error))
        error = (value == NULL ? removexattr(path, xattr) : setxattr(path, xattr, value, n_value, flags)) < 0 ? errno
                                                                                                              : 0;
    return error;
}

static int change_value(Request *request, const char *xattr, const char *value, size_t n_value, int flags) {
    Route route;
    Stat st;
    int fd;
    int result = open_route(request, request->nodeid, &route);
    if (result)
        return result == NOT_OURS ? -EOPNOTSUPP : result;
    Node *node = route.node;
    change_begins(node);
    calls_begin(request);
    int error = reach_inode(request->core, &route, &st, &fd);
    if (!error)
        error = change_xattr(request, fd < 0 ? route.fd->number : fd, &st, xattr, value, n_value, flags);
    if (fd >= 0)
        close(fd);
    calls_end(request);
    node->n_changing--;
    note_change(request, node);
    note_cached_change(request, node, NULL);
    note_refusal(request, node, error);
    if (!error)
        invalidate_attributes(request->core->tables, node); /* an ACL changes the mode */
    close_route(&route);
    return -error;
}

int do_setxattr(Request *request) {
    char xattr[XATTR_NAME_MAX + 1];
    const char *value;
    uint32_t in[2]; /* struct fuse_setxattr_in: size, flags */
    memcpy(in, request->op_in, sizeof in);
    int result = parse_xattr_name(request, xattr, &value);
    if (result)
        return result;
    size_t n = request->n_payload - (size_t)(value - request->payload);
    return change_value(request, xattr, value, in[0] < n ? in[0] : n, (int)in[1]);
}

int do_removexattr(Request *request) {
    char xattr[XATTR_NAME_MAX + 1];
    const char *value;
    int result = parse_xattr_name(request, xattr, &value);
    return result ? result : change_value(request, xattr, NULL, 0, 0);
}
