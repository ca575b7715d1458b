/* The client of bench/names.py: changes names in a directory, each call timed by itself.
 *
 *     names DIRECTORY UID[,GID...]      0: as who starts it
 *
 * A line of stdin is answered by one of stdout:
 *     OPERATION N             "MEAN P50", ns of N calls in the order f0, f1 ...; each leaves what the next one needs
 *     clients K MS            "N NS": operations done by K processes in as long, all of OPERATIONS in turn
 * What fails is told on stderr and ends it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_GROUPS 128
#define LINE_BYTES 128

static const char *doing = "start";

static _Noreturn void fail(const char *name) {
    fprintf(stderr, "%s %s: %s\n", doing, name, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static const char *named(char *room, char kind, int number) {
    sprintf(room, "%c%d", kind, number);
    return room;
}

static void opened(const char *name, int flags) {
    int fd = open(name, flags, 0644);
    if (fd < 0 || close(fd))
        fail(name);
}

static void missing(int number) {
    char name[16];
    struct stat found;
    if (stat(named(name, 'x', number), &found) == 0 || errno != ENOENT)
        fail(name);
}

static void create(int number) {
    char name[16];
    opened(named(name, 'f', number), O_CREAT | O_EXCL | O_WRONLY);
}

static void open_close(int number) {
    char name[16];
    opened(named(name, 'f', number), O_RDONLY);
}

static void append(int number) {
    char name[16], line[LINE_BYTES];
    memset(line, 'x', sizeof line);
    int fd = open(named(name, 'f', number), O_WRONLY | O_APPEND);
    if (fd < 0 || write(fd, line, sizeof line) != sizeof line || close(fd))
        fail(name);
}

static void rename_one(int number) {
    char name[16], new[16];
    if (rename(named(name, 'f', number), named(new, 'g', number)))
        fail(name);
}

static void unlink_one(int number) {
    char name[16];
    if (unlink(named(name, 'g', number)))
        fail(name);
}

static void mkdir_one(int number) {
    char name[16];
    if (mkdir(named(name, 'd', number), 0755))
        fail(name);
}

static void rmdir_one(int number) {
    char name[16];
    if (rmdir(named(name, 'd', number)))
        fail(name);
}

static const struct operation {
    const char *name;
    void (*act)(int);
} operations[] = {
    {"missing", missing}, {"create", create}, {"open", open_close}, {"append", append},
    {"rename", rename_one}, {"unlink", unlink_one}, {"mkdir", mkdir_one}, {"rmdir", rmdir_one},
};
#define N_OPERATIONS (int)(sizeof operations / sizeof *operations)

static int by_size(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

static void time_each(const struct operation *operation, int n) {
    uint64_t *took = calloc((size_t)n, sizeof *took), began = now_ns(), before = began;
    for (int i = 0; i < n; i++) {
        operation->act(i);
        uint64_t after = now_ns();
        took[i] = after - before;
        before = after;
    }
    qsort(took, (size_t)n, sizeof *took, by_size);
    printf("%.1f %ju\n", (double)(before - began) / n, (uintmax_t)took[n / 2]);
    free(took);
}

struct shared {
    atomic_int n_ready, begins, ends;
    atomic_ulong n_done;
};

static void be_client(struct shared *shared, int client) {
    char name[16];
    unsigned long n_done = 0;
    if ((mkdir(named(name, 'c', client), 0755) && errno != EEXIST) || chdir(name))
        fail(name);
    atomic_fetch_add(&shared->n_ready, 1);
    while (!shared->begins)
        usleep(100);
    for (int i = 0; !shared->ends; i++, n_done += N_OPERATIONS)
        for (int at = 0; at < N_OPERATIONS; at++) /* all: the next clients find nothing of theirs */
            operations[at].act(i);
    atomic_fetch_add(&shared->n_done, n_done);
    exit(0);
}

static void run_clients(int n_clients, int ms) {
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        fail("mmap");
    fflush(stdout);
    for (int client = 0; client < n_clients; client++)
        switch (fork()) {
        case -1:
            fail("fork");
        case 0:
            be_client(shared, client);
        }
    int status, has_failed = 0;
    while (shared->n_ready < n_clients && waitpid(-1, &status, WNOHANG) == 0)
        usleep(1000);
    uint64_t began = now_ns();
    shared->begins = 1;
    usleep((useconds_t)ms * 1000);
    shared->ends = 1;
    uint64_t took = now_ns() - began;
    has_failed = shared->n_ready < n_clients;
    while (wait(&status) > 0)
        has_failed |= status != 0;
    if (has_failed)
        exit(1); /* a client has told why */
    printf("%lu %ju\n", (unsigned long)shared->n_done, (uintmax_t)took);
    munmap(shared, sizeof *shared);
}

static void become(char *ids) {
    gid_t groups[MAX_GROUPS];
    int n_groups = 0;
    uid_t uid = (uid_t)atoi(strtok(ids, ","));
    for (char *id; n_groups < MAX_GROUPS && (id = strtok(NULL, ","));)
        groups[n_groups++] = (gid_t)atoi(id);
    if (uid && (setgroups((size_t)n_groups, groups) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)))
        fail("become");
}

int main(int argc, char **argv) {
    char line[64], word[32];
    int n, ms;
    if (argc != 3)
        return 2;
    int is_outside = chdir(argv[1]); /* another's mount lets root not in; what is above a native one may be root's */
    become(argv[2]);
    if (is_outside && chdir(argv[1]))
        fail(argv[1]);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "clients %d %d", &n, &ms) == 2) {
            doing = "clients";
            run_clients(n, ms);
        } else if (sscanf(line, "%31s %d", word, &n) == 2) {
            int at = 0;
            while (at < N_OPERATIONS && strcmp(operations[at].name, word))
                at++;
            if (at == N_OPERATIONS)
                return 2;
            doing = operations[at].name;
            time_each(&operations[at], n);
        }
        fflush(stdout);
    }
    return 0;
}
