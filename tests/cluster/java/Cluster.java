import java.net.ServerSocket;
import java.util.ArrayList;
import java.util.List;
import java.util.Queue;
import java.util.Scanner;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * A name server and brokers under the folder args[0], with the names args[1..]. Prints "ready NAMESERVER BROKER...". Reads commands
 * from standard input, each answered by a line, and ends when that is closed: "stop NAME" and "start NAME" of a broker, "join TOPIC
 * ORDERLY", "received -" and "leave -" of a Java member of a group.
 */
public class Cluster {
    static String home, server;
    static NamesrvController names;
    static DefaultMQPushConsumer member;
    static final Queue<String> received = new ConcurrentLinkedQueue<>();

    public static void main(String[] args) throws Exception {
        home = args[0];
        // As BrokerStartup does: a name server ignores the topics of brokers whose frames have no version.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        NettyServerConfig netty = new NettyServerConfig();
        netty.setListenPort(freePort());
        NamesrvConfig config = new NamesrvConfig();
        config.setRocketmqHome(home);
        config.setKvConfigPath(home + "/kvConfig.json");
        config.setConfigStorePath(home + "/namesrv.properties");
        names = new NamesrvController(config, netty);
        if (!names.initialize()) throw new IllegalStateException("name server");
        names.start();
        server = "127.0.0.1:" + netty.getListenPort();

        List<String> known = List.of(args).subList(1, args.length);
        List<Integer> ports = new ArrayList<>();
        List<BrokerController> brokers = new ArrayList<>();
        StringBuilder ready = new StringBuilder("ready " + server);
        for (String name : known) {
            int port = freePort();
            ports.add(port);
            brokers.add(broker(name, port));
            ready.append(" 127.0.0.1:").append(port);
        }
        System.out.println(ready);
        Scanner commands = new Scanner(System.in);
        while (commands.hasNextLine()) {
            String[] words = commands.nextLine().split(" ");
            int at = known.indexOf(words[1]);
            String answer = "";
            if (words[0].equals("stop")) brokers.get(at).shutdown();
            else if (words[0].equals("start")) brokers.set(at, broker(words[1], ports.get(at)));
            else if (words[0].equals("join")) join(words[1], words[2].equals("True"));
            else if (words[0].equals("leave")) member.shutdown();
            else answer = " " + String.join(" ", received);
            System.out.println("done" + answer);
        }
        Runtime.getRuntime().halt(0); // the parent has ended
    }

    /** Be a member of a group that has the name of its topic. */
    static void join(String topic, boolean orderly) throws Exception {
        received.clear();
        member = new DefaultMQPushConsumer(topic);
        member.setNamesrvAddr(server);
        member.setInstanceName(topic);
        member.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        member.subscribe(topic, "*");
        if (orderly) member.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) received.add(new String(message.getBody()));
            return ConsumeOrderlyStatus.SUCCESS;
        });
        else member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) received.add(new String(message.getBody()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        member.start();
    }

    static int freePort() throws Exception {
        while (true) {
            try (ServerSocket socket = new ServerSocket(0)) {
                int port = socket.getLocalPort();
                if (port <= 10_000) continue;
                try (ServerSocket vip = new ServerSocket(port - 2); ServerSocket high = new ServerSocket(port + 1)) {
                    return port;
                } catch (java.net.BindException taken) {
                    continue;
                }
            }
        }
    }

    static boolean registered(String name) {
        TopicRouteData route = names.getRouteInfoManager().pickupTopicRouteData("TBW102");
        return route != null && route.getBrokerDatas().stream().anyMatch(data -> data.getBrokerName().equals(name));
    }

    static BrokerController broker(String name, int port) throws Exception {
        BrokerConfig config = new BrokerConfig();
        config.setBrokerName(name);
        config.setBrokerClusterName("DefaultCluster");
        config.setBrokerIP1("127.0.0.1");
        config.setNamesrvAddr(server);
        config.setRocketmqHome(home);
        config.setAutoCreateTopicEnable(true);
        config.setEnablePropertyFilter(true);
        config.setRecallMessageEnable(true);
        config.setRegisterNameServerPeriod(10_000);
        config.setTransactionTimeOut(1000);
        config.setTransactionCheckInterval(2000);
        MessageStoreConfig store = new MessageStoreConfig();
        store.setStorePathRootDir(home + "/" + name);
        store.setStorePathCommitLog(home + "/" + name + "/commitlog");
        store.setMappedFileSizeCommitLog(16 << 20);
        store.setMappedFileSizeConsumeQueue(20 * 3000);
        store.setMappedFileSizeTimerLog(1 << 20);
        store.setMaxHashSlotNum(1000);
        store.setMaxIndexNum(4000);
        store.setTimerWheelEnable(true);
        store.setTimerPrecisionMs(100);
        store.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        store.setFlushIntervalCommitLog(50);
        store.setDiskMaxUsedSpaceRatio(95);
        store.setHaListenPort(port + 1);
        NettyServerConfig netty = new NettyServerConfig();
        netty.setListenPort(port);
        BrokerController broker = new BrokerController(config, netty, new NettyClientConfig(), store);
        if (!broker.initialize()) throw new IllegalStateException("broker " + name);
        broker.start();
        // A broker registers only with name servers that it has seen to be there, which it looks for each three seconds.
        while (!registered(name)) {
            broker.registerBrokerAll(true, false, true);
            Thread.sleep(100);
        }
        return broker;
    }
}
