/* Acts as the caller for one system call, as DropAdoption._move and call_as do in Python. Nothing here needs the
 * interpreter's lock.
 *
 * If all inodes involved are the caller's, the first try uses the caller's ids only. If that is refused, or other
 * owners are involved, the groups and capabilities that /proc shows after that are used, too. They are not kept for
 * later calls. */
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

enum { PROC_BYTES = 4096 };
enum { BY_IDS, WITH_RIGHTS, NO_MORE }; /* tries of CallerAttempts */
typedef struct {
    uint32_t *groups; /* supplementary */
    int n_groups;
    uint64_t capabilities; /* effective, in the caller's user namespace */
    bool is_ours;          /* the namespace is ours; else a capability counts only for ids that are mapped there */
} Rights;
static const uint32_t NO_ID = UINT32_MAX; /* for setfsuid(2): changes nothing and returns the current id */

static int set_capabilities(const char *sets) {
    static const uint32_t header[2] = {0x20080522, 0};
    return syscall(SYS_capset, header, sets);
}

/* Assume an identity in this thread; groups are set first, while it has all its capabilities. Returns 0 or an errno; in
 * either case restore_identity must follow. */
int assume_identity(const Core *core, Identity *identity) {
    int error = 0;
    if (identity->is_creating)
        identity->umask_before = umask(identity->umask);
    if (!core->acts_as_others)
        return 0;
    /* By number, since the C library's function changes all threads. */
    if (identity->n_groups && syscall(SET_GROUPS, identity->n_groups, identity->groups) < 0) {
        error = errno;
        identity->n_groups = 0; /* nothing to restore: a user namespace may forbid setgroups */
    }
    if (identity->gid)
        identity->gid_before = setfsgid(identity->gid);
    if (identity->uid)
        identity->uid_before = setfsuid(identity->uid);
    if (identity->capability_sets != NULL && set_capabilities(identity->capability_sets) < 0)
        error = errno;
    /* setfsgid and setfsuid do not report failure. */
    if ((identity->gid && (uint32_t)setfsgid(NO_ID) != identity->gid) ||
        (identity->uid && (uint32_t)setfsuid(NO_ID) != identity->uid))
        error = EPERM;
    return error;
}

/* Restore the thread's own identity, or end the process: nothing may be done as the wrong user. */
void restore_identity(const Core *core, const Identity *identity) {
    static const char message[] = "trashd: a thread did not get its own identity back\n";
    bool is_itself = true;
    if (core->acts_as_others) {
        if (identity->uid)
            setfsuid(identity->uid_before);
        if (identity->gid)
            setfsgid(identity->gid_before);
        if (identity->capability_sets != NULL)
            is_itself &= set_capabilities(core->at_rest) == 0;
        if (identity->n_groups)
            is_itself &= syscall(SET_GROUPS, 0, NULL) == 0;
        is_itself &= !(identity->gid && (uint32_t)setfsgid(NO_ID) != identity->gid_before);
        is_itself &= !(identity->uid && (uint32_t)setfsuid(NO_ID) != identity->uid_before);
    }
    if (identity->is_creating)
        umask(identity->umask_before);
    if (!is_itself) {
        if (write(2, message, sizeof message - 1)) {
        }
        _exit(70);
    }
}

/* Return the text after a keyword that begins a line of /proc/PID/status; NULL: no such line. A process's name can't
 * imitate one: the kernel prints its newlines as \n. */
static const char *text_after(const char *status, const char *word) {
    const char *at = strstr(status, word);
    return at == NULL ? NULL : at + strlen(word);
}

/* Return whether the fourth id of such a line, used for file access, is the request's. */
static bool is_id(const char *status, const char *word, uint32_t id) {
    unsigned long ids[4];
    const char *at = text_after(status, word);
    return at != NULL && sscanf(at, "%lu %lu %lu %lu", &ids[0], &ids[1], &ids[2], &ids[3]) == 4 && ids[3] == id;
}

/* Parse group ids, to be freed. Returns how many. */
static int groups_of(const char *at, uint32_t **groups) {
    int n = 0;
    *groups = NULL;
    while (*at && *at != '\n') {
        char *end;
        unsigned long group = strtoul(at, &end, 10);
        if (end == at) { /* a blank at the end of the line */
            at++;
            continue;
        }
        if (!(n & (n - 1))) /* the array grows at powers of two */
            *groups = allocate(*groups, (n ? 2 * (size_t)n : 1) * sizeof **groups);
        (*groups)[n++] = (uint32_t)group;
        at = end;
    }
    return n;
}

/* Read a file in the /proc directory of the thread that sent a request. Returns its text, to be freed; NULL: it can't
 * be read. */
static char *read_proc_file(const Request *request, const char *name) {
    char path[40], *text = NULL;
    size_t n = 0, room = PROC_BYTES;
    snprintf(path, sizeof path, "/proc/%u/%s", request->pid, name);
    int fd = request->pid ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n_read = -1;
    while (fd >= 0) {
        text = allocate(text, room + 1);
        n_read = read(fd, text + n, room - n);
        if (n_read <= 0)
            break;
        n += (size_t)n_read;
        room += n == room ? room : 0;
    }
    if (fd >= 0)
        close(fd);
    if (n_read < 0) {
        free(text);
        return NULL;
    }
    text[n] = 0;
    return text;
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

/* Return the groups and capabilities that the caller has now; none if they can't be read. The groups are to be freed.
 *
 * A thread whose ids differ from the request's acts for another user (overlayfs above, nfsd, io_uring), and its own
 * groups and capabilities do not count. But if the request's uid is 0, all capabilities count: only root can have let
 * the thread act as root. */
static Rights rights_of(const Request *request) {
    Rights rights = {0};
    char *status = read_proc_file(request, "status");
    if (status == NULL)
        return rights;
    const char *groups = text_after(status, "\nGroups:"), *effective = text_after(status, "\nCapEff:");
    if (!is_id(status, "\nUid:", request->uid) || !is_id(status, "\nGid:", request->gid)) {
        if (!request->uid)
            rights.capabilities = UINT64_MAX, rights.is_ours = true;
    } else if (groups != NULL && effective != NULL) {
        rights.n_groups = groups_of(groups, &rights.groups);
        rights.capabilities = strtoull(effective, NULL, 16);
        rights.is_ours = rights.capabilities && is_of_our_namespace(request->core, request->pid);
    }
    free(status);
    return rights;
}

static bool is_mapped(const Request *request, const char *name, uint32_t id) {
    char *map = read_proc_file(request, name);
    unsigned long inside, first, n;
    bool is_it = false;
    for (const char *line = map; line != NULL && sscanf(line, "%lu %lu %lu", &inside, &first, &n) == 3;) {
        is_it |= id >= first && id - first < n;
        line = strchr(line, '\n');
        line = line == NULL ? NULL : line + 1;
    }
    free(map);
    return is_it;
}

/* Return whether the caller's user namespace maps an owner and a group, so that a capability of the caller's counts for
 * them. gid: ANY_GROUP: any. Source: capable_wrt_inode_uidgid in kernel/capability.c, inode_owner_or_capable in
 * fs/inode.c */
static bool maps_ids(const Request *request, uint32_t uid, int64_t gid) {
    return is_mapped(request, "uid_map", uid) && (gid == ANY_GROUP || is_mapped(request, "gid_map", (uint32_t)gid));
}

/* Return whether the caller has a capability in our user namespace. */
bool is_capable(const Request *request, int capability) {
    Rights rights = rights_of(request);
    free(rights.groups);
    return rights.is_ours && rights.capabilities >> capability & 1;
}

/* Return whether the caller may set or keep an inode's set-group-ID bit. Source: in_group_or_capable in fs/inode.c */
bool keeps_group(const Request *request, const Stat *st) {
    if (request->gid == st->gid)
        return true;
    Rights rights = rights_of(request);
    bool is_kept = false;
    for (int at = 0; at < rights.n_groups; at++)
        is_kept |= rights.groups[at] == st->gid;
    free(rights.groups);
    return is_kept || (rights.capabilities >> FSETID & 1 && (rights.is_ours || maps_ids(request, st->uid, st->gid)));
}

/* Return the capabilities that the caller acts with. If it is in another user namespace, these are the ones that the
 * action needs on inodes whose ids are mapped there. */
static uint64_t capabilities_for(const CallerAttempts *attempts, const Rights *rights) {
    uint64_t needed = 0, unknown = 0;
    if (rights->is_ours || !rights->capabilities)
        return rights->capabilities;
    for (int at = 0; at < attempts->n_needs; at++) {
        const NeededCapability *need = &attempts->needs[at];
        uint64_t bits = need->capability == DAC_OVERRIDE ? 1u << DAC_OVERRIDE | 1u << DAC_READ_SEARCH
                                                         : 1ull << need->capability;
        needed |= bits;
        if (!maps_ids(attempts->request, need->uid, need->gid))
            unknown |= bits;
    }
    return rights->capabilities & needed & ~unknown;
}

/* Assume all groups and capabilities that the caller has now. */
static void assume_rights(CallerAttempts *attempts) {
    const Request *request = attempts->request;
    const Core *core = request->core;
    Identity *identity = &attempts->identity;
    Rights rights = rights_of(request);
    uint64_t capabilities = attempts->lacks_capabilities ? 0 : capabilities_for(attempts, &rights);
    uint32_t ours[6], theirs[6]; /* effective, permitted, inheritable; then the same for capabilities 32 and above */
    memcpy(ours, core->at_rest, sizeof ours);
    memcpy(theirs, core->no_capabilities, sizeof theirs);
    uint32_t low = (uint32_t)capabilities, high = (uint32_t)(capabilities >> 32);
    attempts->groups = rights.groups;
    identity->capability_sets = NULL;
    if (!request->uid && !(ours[0] & ~low) && !(ours[3] & ~high))
        return; /* root with our capabilities needs no group */
    theirs[0] = low & theirs[1], theirs[3] = high & theirs[4];
    memcpy(attempts->sets, theirs, sizeof theirs);
    identity->capability_sets = attempts->sets;
    identity->groups = rights.groups, identity->n_groups = rights.n_groups;
}

/* Return the id to act with; nobody's if the id is not mapped here, or absent. */
static uint32_t mapped_id(uint32_t id) { return id == NO_ID ? NOBODY : id; }

/* Prepare an action of the caller. is_own: only the caller's inodes are involved, so that groups can't matter. */
CallerAttempts attempt_as_caller(const Request *request, bool is_own) {
    const Core *core = request->core;
    uint32_t uid = mapped_id(request->uid);
    return (CallerAttempts){
        .request = request,
        .next_try = !core->acts_as_others || is_own ? BY_IDS : WITH_RIGHTS,
        .identity = {.uid = uid, .gid = mapped_id(request->gid), .capability_sets = uid ? NULL : core->no_capabilities},
    };
}

/* Prepare an action, with the capabilities that it needs for the inodes involved, by their present owners. */
CallerAttempts attempt_with_needs(const Request *request, const NeededCapability *needs, int n) {
    bool is_own = true;
    for (int at = 0; at < n; at++)
        is_own &= needs[at].uid == mapped_id(request->uid);
    CallerAttempts attempts = attempt_as_caller(request, is_own);
    memcpy(attempts.needs, needs, (size_t)n * sizeof *needs);
    attempts.n_needs = n;
    return attempts;
}

/* Prepare to read, without the caller's capabilities, an attribute that the filesystem hides from some users. */
CallerAttempts attempt_to_read(const Request *request) {
    CallerAttempts attempts = attempt_as_caller(request, false);
    attempts.lacks_capabilities = true;
    return attempts;
}

/* Return whether to try the action now, as its caller. It is called again after each try, and first restores this
 * thread's identity:
 *
 *     while (next_attempt(&attempts, &error))
 *         error = unlinkat(...) < 0 ? errno : 0;
 *
 * The loop must not end in any other way. error: of the last try; EACCES if there was none */
bool next_attempt(CallerAttempts *attempts, int *error) {
    const Core *core = attempts->request->core;
    if (attempts->is_assumed) {
        restore_identity(core, &attempts->identity);
        attempts->is_assumed = false;
        if (*error != EPERM && *error != EACCES)
            attempts->next_try = NO_MORE;
    } else
        *error = EACCES;
    while (attempts->next_try != NO_MORE) {
        int now = attempts->next_try;
        attempts->next_try = now == BY_IDS && core->acts_as_others ? WITH_RIGHTS : NO_MORE;
        if (now == WITH_RIGHTS)
            assume_rights(attempts);
        attempts->is_assumed = assume_identity(core, &attempts->identity) == 0;
        if (attempts->is_assumed)
            return true;
        restore_identity(core, &attempts->identity);
    }
    free(attempts->groups);
    attempts->groups = NULL;
    return false;
}
