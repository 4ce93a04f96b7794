/* Prints the effective user id: installed set-user-ID root by the test. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("%d\n", (int)geteuid());
    return 0;
}
