/* L4, each rank: the threads that share out the pieces of a kernel's work. Owns them and what they work at.
 *
 * A piece belongs to the thread that claims it, so who calls never waits for one that has not come: where other
 * programs use the cores too, a thread may be kept from running for milliseconds. Who waits for the last pieces, or for
 * more work, spins for a moment, in which a step mostly goes on, and then sleeps: a thread that spins holds up those it
 * waits for.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cpu.h"

enum { SPIN_NS = 100000 }; /* between two kernels of a step there is less */
enum { EACH = 4 };         /* pieces for each thread: who is slow, or late, leaves them to others */

/* The number of the work's pieces in the upper half and the next of them in the lower, in one word, so that who comes
 * late can not take a piece of what is over for one of what has begun since. */
static _Alignas(64) atomic_ullong claims;
static _Alignas(64) atomic_uint turn;
static _Alignas(64) atomic_uint unfinished;
static atomic_uint sleepers;
static atomic_uint caller_sleeps;
static atomic_flag taken = ATOMIC_FLAG_INIT;
static atomic_long helpers;

static struct {
    Work work;
    const void *argument;
    long items, pieces;
} current;

static void do_piece(long piece)
{
    long items = current.items, pieces = current.pieces;
    current.work(current.argument, items * piece / pieces, items * (piece + 1) / pieces);
}

static void sleep_on(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

/* Until the word has another value; False if that takes long. */
static int changes_soon(atomic_uint *word, unsigned value)
{
    for (long begin = now(); now() - begin < SPIN_NS;)
        for (int i = 0; i < 16; i++) {
            if (atomic_load(word) != value) return 1;
            _mm_pause();
        }
    return 0;
}

static void work(void)
{
    for (;;) {
        unsigned long long claim = atomic_fetch_add(&claims, 1);
        long piece = (uint32_t)claim;
        if (piece >= (long)(claim >> 32)) return;
        do_piece(piece);
        if (atomic_fetch_sub(&unfinished, 1) == 1 && atomic_load(&caller_sleeps)) wake(&unfinished);
    }
}

static void *help(void *own)
{
    long thread = (long)own;
    unsigned seen = 0;
    for (;;) {
        if (!changes_soon(&turn, seen)) {
            atomic_fetch_add(&sleepers, 1);
            sleep_on(&turn, seen);
            atomic_fetch_sub(&sleepers, 1);
        }
        unsigned next = atomic_load(&turn);
        if (next != seen && thread <= atomic_load(&helpers)) work();
        seen = next;
    }
    return NULL;
}

/* How many helpers there are, `wanted` at most. */
static long have(long wanted)
{
    static long started = 0;
    for (; started < wanted; started++) {
        sigset_t all, before;
        pthread_t thread;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the interpreter's */
        int failed = pthread_create(&thread, NULL, help, (void *)(started + 1));
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (failed) break;
        pthread_detach(thread);
    }
    return MIN(started, wanted);
}

void share_out(Work function, const void *argument, long items, long least)
{
    long threads = omp_get_max_threads(); /* as many as torch takes */
    long pieces = MIN(items / MAX(least, 1), EACH * threads);
    if (threads == 1 || pieces < 2 || atomic_flag_test_and_set(&taken)) {
        if (items) function(argument, 0, items);
        return;
    }
    atomic_store(&helpers, have(threads - 1));
    current.work = function, current.argument = argument, current.items = items, current.pieces = pieces;
    atomic_store(&caller_sleeps, 0);
    atomic_store(&unfinished, (unsigned)pieces);
    atomic_store(&claims, (unsigned long long)pieces << 32);
    atomic_fetch_add(&turn, 1);
    if (atomic_load(&sleepers)) wake(&turn);
    work();
    for (unsigned left; (left = atomic_load(&unfinished));)
        if (!changes_soon(&unfinished, left)) {
            atomic_store(&caller_sleeps, 1);
            sleep_on(&unfinished, left);
        }
    atomic_flag_clear(&taken);
}
