/* One act of a caller's, with the identity that it takes: as AsCaller.call and call_as do it. System calls only,
 * without the interpreter's lock.
 *
 * First by the caller's ids alone where all that is judged is the caller's. Else, and if that is refused, with the
 * groups and capabilities that /proc tells of at that moment; nothing of them is kept. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>

#ifdef SYS_setgroups32
#define SET_GROUPS SYS_setgroups32
#else
#define SET_GROUPS SYS_setgroups
#endif

enum { STATUS_BYTES = 4096 };
enum { ALONE, WITH_RIGHTS, NO_MORE }; /* an Acting's tries */
static const uint32_t NO_ID = UINT32_MAX; /* setfsuid(2) changes nothing then, and tells the present one */

static int take_up(const char *sets) {
    static const uint32_t header[2] = {0x20080522, 0};
    return syscall(SYS_capset, header, sets);
}

/* From now on this thread acts as that; groups are changed while it has all its capabilities. Returns 0 or an errno;
 * in either case act_end must follow. */
int act_begin(const Core *core, Actor *actor) {
    int error = 0;
    if (actor->makes)
        actor->umask_before = umask(actor->umask);
    if (!core->acts_as_others)
        return 0;
    /* By number: the C library's function takes all threads along. */
    if (actor->n_groups && syscall(SET_GROUPS, actor->n_groups, actor->groups) < 0) {
        error = errno;
        actor->n_groups = 0; /* there are none to give back: a user namespace may forbid it */
    }
    if (actor->gid)
        actor->gid_before = setfsgid(actor->gid);
    if (actor->uid)
        actor->uid_before = setfsuid(actor->uid);
    if (actor->sets != NULL && take_up(actor->sets) < 0)
        error = errno;
    /* Neither says whether it has worked. */
    if ((actor->gid && (uint32_t)setfsgid(NO_ID) != actor->gid) || (actor->uid && (uint32_t)setfsuid(NO_ID) != actor->uid))
        error = EPERM;
    return error;
}

/* The thread is itself again; or the process ends: nothing may be done as the wrong one. */
void act_end(const Core *core, const Actor *actor) {
    static const char told[] = "trashd: a thread did not get its own identity back\n";
    bool is_itself = true;
    if (core->acts_as_others) {
        if (actor->uid)
            setfsuid(actor->uid_before);
        if (actor->gid)
            setfsgid(actor->gid_before);
        if (actor->sets != NULL)
            is_itself &= take_up(core->at_rest) == 0;
        if (actor->n_groups)
            is_itself &= syscall(SET_GROUPS, 0, NULL) == 0;
        is_itself &= !(actor->gid && (uint32_t)setfsgid(NO_ID) != actor->gid_before);
        is_itself &= !(actor->uid && (uint32_t)setfsuid(NO_ID) != actor->uid_before);
    }
    if (actor->makes)
        umask(actor->umask_before);
    if (!is_itself) {
        if (write(2, told, sizeof told - 1)) {
        }
        _exit(70);
    }
}

/* What follows a word that begins a line of /proc/PID/status; NULL: it has no such line. No name of a process can
 * feign one: the kernel writes its newlines as \n. */
static const char *after(const char *status, const char *word) {
    const char *at = strstr(status, word);
    return at == NULL ? NULL : at + strlen(word);
}

/* Whether the last of the four ids of such a line, which files are accessed with, is the request's. */
static bool is_id(const char *status, const char *word, uint32_t id) {
    unsigned long ids[4];
    const char *at = after(status, word);
    return at != NULL && sscanf(at, "%lu %lu %lu %lu", &ids[0], &ids[1], &ids[2], &ids[3]) == 4 && ids[3] == id;
}

/* The groups there; -1: they are more than is simple. */
static int groups_of(const char *at, uint32_t *groups) {
    int n = 0;
    for (char *end; *at && *at != '\n'; at = end) {
        unsigned long group = strtoul(at, &end, 10);
        if (end == at) { /* a blank at the line's end, and no more */
            end++;
            continue;
        }
        if (n == N_GROUPS)
            return -1;
        groups[n++] = (uint32_t)group;
    }
    return n;
}

static bool is_of_our_namespace(const Core *core, uint32_t pid) {
    char path[40], name[sizeof core->user_namespace];
    snprintf(path, sizeof path, "/proc/%u/ns/user", pid);
    ssize_t n = readlink(path, name, sizeof name - 1);
    if (n <= 0)
        return false;
    name[n] = 0;
    return !strcmp(name, core->user_namespace);
}

/* Have all that the caller has now, as `rights_of`. Returns false: it can't be seen, acts for another, or is of another
 * user namespace, and so on: Python knows what counts then. */
static bool take_rights(Acting *acting) {
    const Request *request = acting->request;
    const Core *core = request->core;
    Actor *actor = &acting->actor;
    char path[40], status[STATUS_BYTES];
    snprintf(path, sizeof path, "/proc/%u/status", request->pid);
    int fd = request->pid ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    ssize_t n = read(fd, status, sizeof status);
    close(fd);
    if (n <= 0 || n == sizeof status) /* there may be more of it */
        return false;
    status[n] = 0;
    const char *groups = after(status, "\nGroups:"), *effective = after(status, "\nCapEff:");
    if (!is_id(status, "\nUid:", request->uid) || !is_id(status, "\nGid:", request->gid) || groups == NULL ||
        effective == NULL)
        return false;
    uint64_t capabilities = strtoull(effective, NULL, 16);
    if (capabilities && !is_of_our_namespace(core, request->pid))
        return false;
    uint32_t ours[6], his[6]; /* effective, permitted, inheritable; the same of capabilities 32 and above */
    memcpy(ours, core->at_rest, sizeof ours);
    memcpy(his, core->no_capabilities, sizeof his);
    uint32_t low = (uint32_t)capabilities, high = (uint32_t)(capabilities >> 32);
    actor->sets = NULL;
    if (!request->uid && !(ours[0] & ~low) && !(ours[3] & ~high))
        return true; /* root as we are; he needs no group */
    his[0] = low & his[1], his[3] = high & his[4];
    memcpy(acting->sets, his, sizeof his);
    actor->sets = acting->sets;
    int n_groups = groups_of(groups, acting->groups);
    actor->groups = acting->groups, actor->n_groups = n_groups > 0 ? n_groups : 0;
    return n_groups >= 0;
}

/* An act of the caller's. is_own: all that is judged is the caller's, whose groups can't matter then */
Acting acting_as(const Request *request, bool is_own) {
    const Core *core = request->core;
    bool begins = !core->acts_as_others || (is_own && is_known(request));
    return (Acting){
        .request = request,
        .next = begins ? ALONE : is_known(request) ? WITH_RIGHTS : NO_MORE,
        .actor = {.uid = request->uid, .gid = request->gid, .sets = request->uid ? NULL : core->no_capabilities},
    };
}

Acting making_as(const Request *request, bool is_own, uint32_t with_umask) {
    Acting acting = acting_as(request, is_own);
    acting.actor.makes = true, acting.actor.umask = with_umask;
    return acting;
}

/* Whether the act is to be made now, as its caller; it is asked again after each try, and then this thread is itself:
 *
 *     while (acts(&acting, &error))
 *         error = unlinkat(...) < 0 ? errno : 0;
 *
 * Nothing may leave that loop otherwise. error: of the last try; EACCES if there was none */
bool acts(Acting *acting, int *error) {
    const Core *core = acting->request->core;
    if (acting->is_begun) {
        act_end(core, &acting->actor);
        acting->is_begun = false;
        if (*error != EPERM && *error != EACCES)
            return false;
    } else
        *error = EACCES;
    while (acting->next != NO_MORE) {
        int now = acting->next;
        acting->next = now == ALONE && core->acts_as_others ? WITH_RIGHTS : NO_MORE;
        if (now == WITH_RIGHTS && !take_rights(acting))
            return false;
        acting->is_begun = act_begin(core, &acting->actor) == 0;
        if (acting->is_begun)
            return true;
        act_end(core, &acting->actor);
    }
    return false;
}

/* Whether what an fd holds is the caller's. */
bool is_owner(const Request *request, int fd) {
    struct stat found;
    return !request->core->acts_as_others || (fstat(fd, &found) == 0 && found.st_uid == request->uid);
}
