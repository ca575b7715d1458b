/* The least that a deletion beside others takes: unlinkat at an even rate, without pacing.
 *
 *     even_unlinks FILES_PER_S DIRECTORY
 *
 * Empties the directory and those in it, one file after the other. The first error ends it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <err.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { NS_PER_S = 1000000000 };
static struct timespec due;

static void empty(int fd, long gap_ns) {
    DIR *listing = fdopendir(fd);
    if (!listing)
        err(1, "fdopendir");
    for (struct dirent *entry; (entry = readdir(listing));) {
        const char *name = entry->d_name;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        if (entry->d_type == DT_DIR) {
            int below = openat(fd, name, O_RDONLY | O_DIRECTORY);
            if (below < 0)
                err(1, "%s", name);
            empty(below, gap_ns);
        } else {
            due.tv_nsec += gap_ns;
            due.tv_sec += due.tv_nsec / NS_PER_S;
            due.tv_nsec %= NS_PER_S;
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
        }
        if (unlinkat(fd, name, entry->d_type == DT_DIR ? AT_REMOVEDIR : 0) < 0)
            err(1, "unlinkat %s", name);
    }
    closedir(listing);
}

int main(int argc, char **argv) {
    long per_s = argc == 3 ? atol(argv[1]) : 0;
    int fd = per_s > 0 ? open(argv[2], O_RDONLY | O_DIRECTORY) : -1;
    if (fd < 0)
        errx(2, "usage: even_unlinks FILES_PER_S DIRECTORY");
    prctl(PR_SET_TIMERSLACK, 1);
    clock_gettime(CLOCK_MONOTONIC, &due);
    empty(fd, NS_PER_S / per_s);
}
