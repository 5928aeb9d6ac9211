/* The last steps of a child before it executes a command: what `restrict.apply` does for children that the zygote
 * forks, for those that it spawns. A small program, so that a run does not pay for the copy of an interpreter.
 * Compiled by `spawn_helper.py`; without a C compiler, or where children must restrict themselves, the zygote forks.
 *
 *     start FOLDER USER NUMBER_OF_LIMITS (RESOURCE SOFT HARD)... COMMAND...      USER -1: stay, without capabilities
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static void need(int is_done, const char *what) {
    if (is_done) return;
    const char *why = strerror(errno);
    dprintf(2, "sandbox: %s: %s\n", what, why);
    _exit(127);
}

static void close_all_but_the_streams(void) {
#ifdef SYS_close_range
    if (syscall(SYS_close_range, 3U, ~0U, 0U) == 0) return;
#endif
    for (int descriptor = 3; descriptor < 4096; descriptor++) close(descriptor);
}

static void reset_signals_of_the_c_library(void) {
    long by_default[8] = {0}; /* as large as the kernel's structure; posix_spawn leaves these two ignored */
    for (int number = 32; number < 34; number++) syscall(SYS_rt_sigaction, number, by_default, NULL, 8);
}

static void limit(int resource, rlim_t soft, rlim_t hard) {
    struct rlimit wanted = {soft, hard}, ours;
    if (setrlimit(resource, &wanted) == 0) return;
    need(getrlimit(resource, &ours) == 0, "getrlimit"); /* we have a lower one ourselves, which can't be raised */
    if (wanted.rlim_max > ours.rlim_max) wanted.rlim_max = ours.rlim_max;
    if (wanted.rlim_cur > wanted.rlim_max) wanted.rlim_cur = wanted.rlim_max;
    need(setrlimit(resource, &wanted) == 0, "setrlimit");
}

static void drop_capabilities(void) {
    unsigned header[2] = {0x20080522, 0}, none[6] = {0};
    need(syscall(SYS_capset, header, none) == 0, "capset");
}

int main(int count, char **words, char **environment) {
    need(count > 4, "too few words");
    long user = atol(words[2]);
    int limits = atoi(words[3]), command = 4 + 3 * limits;
    need(command < count, "no command");
    close_all_but_the_streams();
    reset_signals_of_the_c_library();
    need(setsid() != -1, "setsid");
    need(chdir(words[1]) == 0, words[1]);
    for (char **word = words + 4; word < words + command; word += 3)
        limit(atoi(word[0]), strtoull(word[1], NULL, 10), strtoull(word[2], NULL, 10));
    if (user < 0) drop_capabilities();
    else need(setresuid(user, user, user) == 0, "setresuid"); /* which takes the capabilities away as well */
    need(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0, "prctl"); /* its own /proc/self belongs to it */
    execve(words[command], words + command, environment);
    need(0, words[command]);
    return 127;
}
