/* Of slowfs: nodes, and what every request goes through. */
#include "slowfs.h"

#include <err.h>
#include <pthread.h>
#include <sys/fsuid.h>
#include <time.h>

enum { N_BUCKETS = 1 << 16, HANG_POLL_US = 1000, HANG_POLL_MAX_US = 32000 };

struct node {
    struct node *next;
    fuse_ino_t ino;
    int fd; /* O_PATH */
    uint64_t n_lookups;
};

struct control *control;
struct fuse_session *session;

static int root_fd;
static dev_t device;
static struct node *buckets[N_BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of buckets and of their nodes' n_lookups */

void open_root(const char *source)
{
    struct stat st;
    root_fd = open(source, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0 || fstat(root_fd, &st))
        err(1, "%s", source);
    device = st.st_dev;
}

static struct node **place_of(fuse_ino_t ino)
{
    struct node **place = &buckets[ino % N_BUCKETS];
    while (*place && (*place)->ino != ino)
        place = &(*place)->next;
    return place;
}

int fd_of(fuse_ino_t ino)
{
    if (ino == FUSE_ROOT_ID)
        return root_fd;
    pthread_mutex_lock(&lock);
    struct node *node = *place_of(ino);
    int fd = node ? node->fd : -1;
    pthread_mutex_unlock(&lock);
    return fd;
}

void path_of(fuse_ino_t ino, char path[PATH_SIZE])
{
    snprintf(path, PATH_SIZE, "/proc/self/fd/%d", fd_of(ino));
}

/* Count a reference to what is open at fd, which is taken over. */
static int refer(fuse_ino_t ino, int fd)
{
    pthread_mutex_lock(&lock);
    struct node **place = place_of(ino), *node = *place;
    if (!node && (node = calloc(1, sizeof *node))) {
        *node = (struct node){.ino = ino, .fd = fd};
        *place = node;
        fd = -1;
    }
    if (node)
        node->n_lookups++;
    pthread_mutex_unlock(&lock);
    if (fd >= 0)
        close(fd);
    return node ? 0 : ENOMEM;
}

void forget(fuse_ino_t ino, uint64_t n_lookups)
{
    if (ino == FUSE_ROOT_ID)
        return;
    pthread_mutex_lock(&lock);
    struct node **place = place_of(ino), *node = *place;
    if (node && (node->n_lookups -= n_lookups) == 0)
        *place = node->next;
    else
        node = NULL;
    pthread_mutex_unlock(&lock);
    if (node) {
        close(node->fd);
        free(node);
    }
}

/* What every request goes through before it is done, and after. */

static void wait_us(uint64_t us)
{
    struct timespec left = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (us && clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
        ;
}

/* Whether a request is about a name, or about a node by the name that it has now, with that in it. */
static int is_about(fuse_ino_t ino, const char *name, const char *part)
{
    char link[PATH_SIZE], path[4096];
    if (!name) {
        path_of(ino, link);
        ssize_t size = readlink(link, path, sizeof path - 1);
        path[size < 0 ? 0 : size] = '\0';
        name = strrchr(path, '/');
    }
    return name && strstr(name, part);
}

static int is_hung(fuse_ino_t ino, const char *name)
{
    return control->hangs && is_about(ino, name, control->hung_name);
}

int begin(fuse_req_t req, enum operation operation, fuse_ino_t ino, const char *name)
{
    control->counters[operation].n++;
    uint32_t n = ++control->n_under_way, most = control->max_under_way;
    while (n > most && !atomic_compare_exchange_weak(&control->max_under_way, &most, n))
        ;
    if (operation == OP_lookup || operation == OP_getattr || control->delays_all)
        wait_us(control->delay_us);
    if (is_hung(ino, name)) {
        if (write(STDOUT_FILENO, "h", 1) != 1)
            warn("nobody hears that %s hangs", name ? name : "a node");
        /* Hundreds of threads may wait here for a minute: the longer one waits, the less often it asks. */
        for (uint64_t us = HANG_POLL_US; is_hung(ino, name) && !fuse_session_exited(session);) {
            wait_us(us);
            us = us < HANG_POLL_MAX_US ? 2 * us : us;
        }
    }
    int refusal = (int)control->refusal;
    if (!refusal || (control->refused_name[0] && !is_about(ino, name, control->refused_name)))
        return 0;
    end();
    fuse_reply_err(req, refusal);
    return 1;
}

void end(void)
{
    control->n_under_way--;
}

void done(fuse_req_t req, int result)
{
    int error = result < 0 ? errno : 0; /* before anything else may change it */
    end();
    fuse_reply_err(req, error);
}

static double ttl_s(void)
{
    return (double)control->ttl_us / 1e6;
}

/* Look a name up, and count the reference that the answer gives. An errno if there is none to give. */
int find(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry)
{
    struct statx birth;
    *entry = (struct fuse_entry_param){.attr_timeout = ttl_s(), .entry_timeout = ttl_s()};
    int fd = openat(fd_of(parent), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    if (fstat(fd, &entry->attr) || statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &birth)) {
        int error = errno;
        close(fd);
        return error;
    }
    if (entry->attr.st_dev != device) {
        close(fd);
        return EXDEV;
    }
    entry->ino = entry->attr.st_ino;
    entry->generation = (uint32_t)(birth.stx_btime.tv_sec * 1000000000 + birth.stx_btime.tv_nsec);
    return refer(entry->ino, fd);
}

void reply_found(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry;
    int error = find(parent, name, &entry);
    end();
    if (error)
        fuse_reply_err(req, error);
    else if (fuse_reply_entry(req, &entry) == -ENOENT) /* nobody waits for it any more */
        forget(entry.ino, 1);
}

void reply_attributes(fuse_req_t req, fuse_ino_t ino)
{
    struct stat st;
    int error = fstat(fd_of(ino), &st) ? errno : 0;
    end();
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_attr(req, &st, ttl_s());
}

void act_as(fuse_req_t req)
{
    setfsgid(fuse_req_ctx(req)->gid);
    setfsuid(fuse_req_ctx(req)->uid);
}

void act_as_root(void)
{
    int error = errno;
    setfsuid(0);
    setfsgid(0);
    errno = error;
}
