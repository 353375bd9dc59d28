#!/bin/bash
# cluster.sh start|stop|status|purge
#
# A real Slurm cluster (munged + slurmctld + slurmd) and an sshd "login node"
# on this one machine, loopback only, private configuration (nothing under
# /etc/slurm, /etc/munge or /etc/ssh is touched).  Idempotent.  Needs root and
# the Debian packages slurm-wlm munge openssh-server openssh-client rsync
# (installed here if absent) and a `uv` binary (pip install uv).
#
# Knobs (environment):
#   SITE      state directory            (default ${TMPDIR:-/tmp}/espalier-slurm/site)
#   CLUSTER   SkyPilot cluster/ssh alias (default local)
#   JOBUSER   Unix user that owns jobs   (default skyslurm)
#   SSH_PORT  sshd port                  (default 22022)
#   SKYHOME   HOME of the SkyPilot client/API server; ~/.slurm/config is
#             written there              (default ${TMPDIR:-/tmp}/espalier-slurm/home)
#   UV        uv binary                  (default: the one on PATH)
#   GPUS      fake GPUs, gres spec       (default "h100:2"; "" for none)
#   CPUS      CPUs the node claims       (default 8, more than it has, on purpose)
#   MEM_MB    memory the node claims     (default 16000)
set -euo pipefail

SITE=${SITE:-${TMPDIR:-/tmp}/espalier-slurm/site}
CLUSTER=${CLUSTER:-local}
JOBUSER=${JOBUSER:-skyslurm}
SSH_PORT=${SSH_PORT:-22022}
SKYHOME=${SKYHOME:-${TMPDIR:-/tmp}/espalier-slurm/home}
UV=${UV:-$(command -v uv || true)}
GPUS=${GPUS-h100:2}
CPUS=${CPUS:-8}
MEM_MB=${MEM_MB:-16000}
CTLD_PORT=${CTLD_PORT:-26817}
SLURMD_PORT=${SLURMD_PORT:-26818}
# the name must resolve on the node itself (SkyPilot calls gethostbyname on it)
NODE=${NODE:-localhost}
JOBHOME=$SITE/home
export SLURM_CONF=$SITE/etc/slurm.conf

say() { echo "[slurm] $*"; }
pass_env() {  # certificates and package-index settings, and what NODE_ENV adds
  local v
  for v in SSL_CERT_FILE REQUESTS_CA_BUNDLE PIP_CERT PIP_INDEX_URL PIP_FIND_LINKS \
           UV_INDEX_URL UV_DEFAULT_INDEX UV_FIND_LINKS UV_OFFLINE UV_SYSTEM_CERTS \
           http_proxy https_proxy no_proxy; do
    [ -n "${!v:-}" ] && printf ' %s="%s"' "$v" "${!v}"
  done
  [ -z "${SSL_CERT_FILE:-}" ] && [ -f /etc/ssl/certs/ca-certificates.crt ] &&
    printf ' SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt'
  [ -n "${NODE_ENV:-}" ] && printf ' %s' "$NODE_ENV"
  return 0
}
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

install_packages() {
  local want=()
  command -v slurmctld >/dev/null || want+=(slurm-wlm)
  command -v munged    >/dev/null || want+=(munge)
  [ -x /usr/sbin/sshd ]           || want+=(openssh-server)
  command -v ssh       >/dev/null || want+=(openssh-client)
  command -v rsync     >/dev/null || want+=(rsync)
  if [ ${#want[@]} -gt 0 ]; then
    say "apt-get install ${want[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${want[@]}" >"$SITE/log/apt.log" 2>&1
  fi
}

write_files() {
  mkdir -p "$SITE"/{etc,log,run,bin,ssh,spool/ctld,spool/slurmd,munge,dev,fakegpu}
  chmod 755 "$SITE" "$SITE"/{etc,log,run,bin,ssh}
  install_packages

  # -- the user that owns Slurm jobs; its own home, so that what SkyPilot
  #    writes there (~/.bashrc, ~/.ssh/authorized_keys) stays away from root's
  id "$JOBUSER" >/dev/null 2>&1 || useradd --no-create-home --home-dir "$JOBHOME" --shell /bin/bash "$JOBUSER"
  usermod -d "$JOBHOME" "$JOBUSER" >/dev/null 2>&1 || true
  # 'useradd' leaves '!' as the password: sshd without PAM calls that a locked
  # account and refuses keys too; '*' means "no password" and is not locked.
  usermod -p '*' "$JOBUSER" 2>/dev/null || true
  mkdir -p "$JOBHOME/.ssh"; chmod 700 "$JOBHOME/.ssh"

  # -- ssh keys
  [ -f "$SITE/ssh/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$SITE/ssh/host_key"
  [ -f "$SITE/ssh/id" ]       || ssh-keygen -q -t ed25519 -N '' -C slurm -f "$SITE/ssh/id"
  grep -qF "$(cat "$SITE/ssh/id.pub")" "$JOBHOME/.ssh/authorized_keys" 2>/dev/null ||
    cat "$SITE/ssh/id.pub" >>"$JOBHOME/.ssh/authorized_keys"
  chmod 600 "$JOBHOME/.ssh/authorized_keys"
  chown -R "$JOBUSER:" "$JOBHOME"

  cat >"$SITE/etc/sshd_config" <<EOF
Port $SSH_PORT
ListenAddress 127.0.0.1
HostKey $SITE/ssh/host_key
PidFile $SITE/run/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitUserEnvironment no
AllowUsers $JOBUSER
MaxStartups 200
MaxSessions 200
# Slurm's commands find the private slurm.conf by this in every session.
# The rest lets uv/pip on the "node" reach the package index as they do here
# (sshd takes one SetEnv line only: the first one wins).
SetEnv SLURM_CONF=$SLURM_CONF$(pass_env)
Subsystem sftp internal-sftp
EOF

  # -- Slurm
  local gres_types="" node_gres=""
  if [ -n "$GPUS" ]; then
    local type=${GPUS%%:*} n=${GPUS##*:}
    gres_types="GresTypes=gpu"; node_gres="Gres=gpu:$type:$n"
    : >"$SITE/etc/gres.conf"
    for i in $(seq 0 $((n-1))); do
      # character devices (those of /dev/null) stand in for /dev/nvidiaN
      [ -c "$SITE/fakegpu/nvidia$i" ] || { rm -f "$SITE/fakegpu/nvidia$i"; mknod -m 666 "$SITE/fakegpu/nvidia$i" c 1 3; }
      echo "NodeName=$NODE Name=gpu Type=$type File=$SITE/fakegpu/nvidia$i" >>"$SITE/etc/gres.conf"
    done
  else
    rm -f "$SITE/etc/gres.conf"
  fi
  cat >"$SITE/etc/slurm.conf" <<EOF
ClusterName=$CLUSTER
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$CTLD_PORT
SlurmdPort=$SLURMD_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$SITE/munge/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$SITE/spool/ctld
SlurmdSpoolDir=$SITE/spool/slurmd
SlurmctldPidFile=$SITE/run/slurmctld.pid
SlurmdPidFile=$SITE/run/slurmd.pid
SlurmctldLogFile=$SITE/log/slurmctld.log
SlurmdLogFile=$SITE/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=5,sched_min_interval=0
ReturnToService=2
KillWait=5
UnkillableStepTimeout=30
SlurmctldTimeout=60
SlurmdTimeout=60
InactiveLimit=0
MinJobAge=300
PrologSlurmctld=$SITE/bin/prolog-slurmctld
SlurmdParameters=config_overrides
$gres_types
NodeName=$NODE NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=$MEM_MB $node_gres State=UNKNOWN
PartitionName=main Nodes=$NODE Default=YES DefaultTime=1-00:00:00 MaxTime=UNLIMITED State=UP OverSubscribe=NO
EOF

  # -- the offline hook: before a SkyPilot allocation starts, put uv where its
  #    setup commands look for it ($HOME/.local/bin/uv, HOME being the
  #    cluster's own directory), so that it never runs the curl installer, and
  #    make its runtime venv (it would ask uv for Python 3.10, a download).
  [ -n "$UV" ] || { say "no uv binary: pip install uv"; exit 1; }
  install -m 755 "$UV" "$SITE/bin/uv"
  cat >"$SITE/bin/prolog-slurmctld" <<EOF
#!/bin/bash
# Runs as root on the controller before each job. Acts only on jobs that
# SkyPilot submitted (its sbatch script lies in ~/.sky_provision).
exec >>$SITE/log/prolog.log 2>&1
name=\$SLURM_JOB_NAME
echo "\$(date +%T) job \$SLURM_JOB_ID \$name"
[ -f "$JOBHOME/.sky_provision/\$name.sh" ] || exit 0
h=$JOBHOME/.sky_clusters/\$name
r=/tmp/\$name
setpriv --reuid=$JOBUSER --regid=$JOBUSER --clear-groups /bin/bash -ec "
  export HOME=$JOBHOME UV_CACHE_DIR=/tmp/uv_cache_\$(id -u $JOBUSER)$(pass_env | tr -d '"')
  mkdir -p \$h/.local/bin \$r
  ln -sf $SITE/bin/uv \$h/.local/bin/uv
  [ -d \$r/skypilot-runtime ] || $SITE/bin/uv venv -q --seed --python /usr/bin/python3 \$r/skypilot-runtime
"
echo "\$(date +%T) rc \$?"
exit 0
EOF
  chmod 755 "$SITE/bin/prolog-slurmctld"

  # -- SkyPilot's view of the cluster
  mkdir -p "$SKYHOME/.slurm"
  cat >"$SKYHOME/.slurm/config" <<EOF
Host $CLUSTER
    HostName 127.0.0.1
    Port $SSH_PORT
    User $JOBUSER
    IdentityFile $SITE/ssh/id
    IdentitiesOnly yes
EOF
}

start() {
  write_files
  # munge: own key, own socket, run as the munge user
  if [ ! -f "$SITE/munge/munge.key" ]; then
    head -c 1024 /dev/urandom >"$SITE/munge/munge.key"
  fi
  chown -R munge: "$SITE/munge"; chmod 755 "$SITE/munge"; chmod 400 "$SITE/munge/munge.key"
  if ! alive "$SITE/munge/munged.pid"; then
    runuser -u munge -- munged --key-file="$SITE/munge/munge.key" \
      --socket="$SITE/munge/munge.socket" --pid-file="$SITE/munge/munged.pid" \
      --log-file="$SITE/munge/munged.log" --seed-file="$SITE/munge/munged.seed" \
      --num-threads=2
    say "munged started"
  fi
  if ! alive "$SITE/run/slurmctld.pid"; then slurmctld -f "$SLURM_CONF"; say "slurmctld started"; fi
  if ! alive "$SITE/run/slurmd.pid"; then slurmd -N "$NODE" -f "$SLURM_CONF"; say "slurmd started"; fi
  if alive "$SITE/run/sshd.pid" && [ "$(cat "$SITE/run/sshd.sum" 2>/dev/null)" != "$(md5sum <"$SITE/etc/sshd_config")" ]; then
    kill -HUP "$(cat "$SITE/run/sshd.pid")"; sleep 0.5; say "sshd reloaded"
  fi
  md5sum <"$SITE/etc/sshd_config" >"$SITE/run/sshd.sum"
  if ! alive "$SITE/run/sshd.pid"; then
    mkdir -p /run/sshd; /usr/sbin/sshd -f "$SITE/etc/sshd_config" -E "$SITE/log/sshd.log"; say "sshd started"
  fi
  local st=""
  for i in $(seq 20); do
    st=$(timeout 3 sinfo -h -o %T 2>/dev/null | head -1) || true
    case "$st" in
      idle|mixed|allocated) break;;
      down*|drain*) timeout 3 scontrol update nodename="$NODE" state=resume 2>/dev/null || true;;
    esac
    alive "$SITE/run/slurmctld.pid" || { say "slurmctld died:"; tail -5 "$SITE/log/slurmctld.log"; exit 1; }
    alive "$SITE/run/slurmd.pid"    || { say "slurmd died:"; tail -5 "$SITE/log/slurmd.log"; exit 1; }
    sleep 0.5
  done
  status
}

status() {
  for p in munge/munged run/slurmctld run/slurmd run/sshd; do
    if alive "$SITE/$p.pid"; then say "${p##*/} up (pid $(cat "$SITE/$p.pid"))"; else say "${p##*/} DOWN"; fi
  done
  timeout 5 sinfo -N -o '%N %T %c cpus %m MB %G' 2>&1 || return 1
}

stop() {
  if alive "$SITE/run/slurmctld.pid"; then
    timeout 20 scancel -u "$JOBUSER" 2>/dev/null || true
    for i in $(seq 40); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.5; done
  fi
  for p in run/sshd run/slurmd run/slurmctld munge/munged; do
    if alive "$SITE/$p.pid"; then
      pid=$(cat "$SITE/$p.pid"); kill "$pid" || true
      for i in $(seq 40); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
      kill -0 "$pid" 2>/dev/null && kill -9 "$pid" || true
      say "${p##*/} stopped"
    fi
    rm -f "$SITE/$p.pid"
  done
}

case "${1:-}" in
  start) mkdir -p "$SITE/log"; start;;
  stop) stop;;
  status) status;;
  purge) stop; rm -rf "$SITE"; userdel "$JOBUSER" 2>/dev/null || true;;
  *) echo "usage: $0 start|stop|status|purge" >&2; exit 2;;
esac
